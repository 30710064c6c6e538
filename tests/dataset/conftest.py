"""A writer of small datasets with known tokens, in the documented format."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.dataset import Manifest, manifest
from holdfast.dataset.shards import DTYPES, block_digests, dtype_for, shard_digest
from holdfast.pipelines.chaos.proxy import FaultyProxy, Forward, Reply, Request
from holdfast.store import Store, layout, open_store

DATASET_ID = "0123456789abcdef"
END_OF_TEXT = 0
TOKENIZER = (
    '{"added_tokens": [{"id": 0, "content": "<|endoftext|>", "special": true}], "decoder": {"type": "ByteLevel"}, '
    '"model": {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "\\u0120def": 2, "\\u00c3\\u00a9": 3}, '
    '"merges": []}}'
)

Write = Callable[..., Manifest]


class Meter:
    """Counts the bytes and requests that leave the server."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self.bytes = self.requests = 0
        self.ranges: list[str] = []
        proxy.inject(self._count, method="GET", path=".tokens", times=None)

    def _count(self, request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        self.bytes += len(reply.body)
        self.requests += 1
        self.ranges.append(f"{request.path} {request.headers.get('Range')}")
        return reply


@pytest.fixture
def proxy(s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyProxy, s3_url: str) -> Store:
    return open_store(s3_url)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def write(store: Store) -> Write:
    """Write a dataset to `store`: one array of tokens per source and split."""

    def write(
        train: Sequence[NDArray[np.int64]],
        validation: Sequence[NDArray[np.int64]] | None = None,
        shard_tokens: int = 1000,
        vocabulary: int = 50_000,
        to: Store = store,
    ) -> Manifest:
        sources = []
        for index, tokens in enumerate(train):
            splits: dict[str, manifest.Split] = {"train": _split(to, index, "train", tokens, shard_tokens, vocabulary)}
            if validation is not None:
                splits["validation"] = _split(to, index, "validation", validation[index], shard_tokens, vocabulary)
            sources.append(
                manifest.Source(
                    name=f"source-{index}",
                    uri=f"source-{index}/*",
                    lineage=manifest.Lineage(kind="files", files=1, bytes=1, digest="0" * 64),
                    splits=splits,
                    dropped={},
                )
            )
        to.put(layout.dataset(DATASET_ID, "tokenizer.json"), TOKENIZER.encode())
        document = Manifest(
            dataset_id=DATASET_ID,
            tokenizer=manifest.Tokenizer(
                file="tokenizer.json",
                digest=blake3(TOKENIZER.encode()).hexdigest(),
                vocabulary=vocabulary,
                end_of_text="<|endoftext|>",
                end_of_text_id=END_OF_TEXT,
            ),
            sources=tuple(sources),
            settings={},
        )
        to.put(layout.dataset(DATASET_ID), document.dump())
        return document

    return write


def _split(
    store: Store, index: int, name: str, tokens: NDArray[np.int64], shard_tokens: int, vocabulary: int
) -> manifest.Split:
    dtype = dtype_for(vocabulary)
    shards = []
    for number, start in enumerate(range(0, len(tokens), shard_tokens)):
        part = tokens[start : start + shard_tokens].astype(DTYPES[dtype])
        digests = block_digests(part.tobytes())
        shard = manifest.Shard(
            name=f"{index:03d}-{name}-{number:06d}.tokens", tokens=len(part), digest=shard_digest(digests), dtype=dtype
        )
        store.put(layout.dataset(DATASET_ID, shard.name), [part.tobytes(), digests])
        shards.append(shard)
    documents = int((tokens == END_OF_TEXT).sum())
    return manifest.Split(tokens=len(tokens), documents=documents, text_bytes=len(tokens), shards=tuple(shards))
