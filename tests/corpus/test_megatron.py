"""Megatron's indexed data: the tokens that Megatron-Core's builder wrote and its reader gives, taken as they are."""

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast.corpus import prepare, units
from holdfast.corpus.files import SourceFile, digest_of, local_stamp
from holdfast.corpus.megatron import HEADER, MAGIC, document_count, megatron_documents
from holdfast.dataset import Dataset
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose
from tests.corpus.test_chat import tokenizer_json

TEXTS = [prose(number) for number in range(30)]
END = "<|im_end|>"


def written(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """A corpus as Megatron-Core writes it, each document with two sequences."""
    lengths = [part for tokens in documents for part in (len(tokens) // 2, len(tokens) - len(tokens) // 2)]
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])) * width if lengths else np.zeros(0)
    code = {"<u2": 8, "<i4": 4}[dtype]
    head = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents) + 1)
    body = [np.array(lengths, "<i4"), pointers.astype("<i8"), np.arange(0, 2 * len(documents) + 1, 2).astype("<i8")]
    prefix.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in body))
    prefix.with_suffix(".bin").write_bytes(np.array([t for tokens in documents for t in tokens], dtype).tobytes())
    return prefix


def files(prefix: Path) -> tuple[SourceFile, SourceFile]:
    paths = [prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
    first, second = (
        SourceFile(
            path.name, "local", "", str(path), digest_of(path), path.stat().st_size, local_stamp(path), "megatron", ""
        )
        for path in paths
    )
    return first, second


@pytest.fixture
def encoded(tmp_path: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    tokenizer = Tokenizer.from_str(tokenizer_json())
    end = tokenizer.token_to_id(END)
    assert end is not None
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]


def spec_of(make_spec: MakeSpec, uri: Path | str, folder: Path, **data: object) -> Spec:
    tokenizer = {"kind": "file", "path": str(folder / "tokenizer.json"), "end_of_text": END}
    source = {"uri": str(uri), "format": "megatron"} if not str(uri).endswith(".txt") else {"uri": str(uri)}
    return make_spec(source, tokenizer=tokenizer, **data)


def test_the_files_of_megatron_core_are_those_of_its_reader(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for dtype in (np.uint16, np.int32):
        builder = indexed.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
        for number in range(7):
            tokens = torch.arange(10 * number, 11 * number + 3)
            builder.add_document(tokens, [1, len(tokens) - 1])
        builder.finalize(str(tmp_path / "a.idx"))
        reader = indexed.IndexedDataset(str(tmp_path / "a"))
        bounds = reader.document_indices
        expected = [
            np.concatenate([reader[at] for at in range(first, last)]).tolist() for first, last in pairwise(bounds)
        ]
        pair = files(tmp_path / "a")
        assert document_count(*pair) == 7
        found = [tokens.tolist() for _, tokens in megatron_documents(*pair, None, 100)]  # type: ignore[union-attr]
        assert found == expected
        assert [at for at, _ in megatron_documents(*pair, (2, 5), 100)] == [1, 2, 3]


@pytest.mark.parametrize("unit_bytes", [units.UNIT_BYTES, 1000])
def test_its_tokens_are_the_dataset_of_the_texts(
    encoded: list[list[int]],
    store: Store,
    make_spec: MakeSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unit_bytes: int,
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    prefix = written(tmp_path / "corpus_text_document", encoded)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:03d}.txt").write_text(text)
    plain = prepare(spec_of(make_spec, tmp_path / "*.txt", tmp_path, cleaning={"unicode": "none"}), store)
    for uri in (prefix, f"{prefix}.bin", tmp_path / "corpus_*"):
        prepared = prepare(spec_of(make_spec, uri, tmp_path), store)
        assert prepared.documents == plain.documents
        assert prepared.text_bytes == plain.text_bytes
        shards = [
            Dataset.open(store, each.dataset_id, tmp_path / "cache").manifest.shards() for each in (prepared, plain)
        ]
        assert [shard.digest for shard in shards[0]] == [shard.digest for shard in shards[1]]


def test_tokens_of_another_tokenizer_are_refused(
    encoded: list[list[int]], store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    encoded[3][5] = 600
    prefix = written(tmp_path / "a", encoded, "<i4")
    with pytest.raises(DataError, match=r"a\.bin: has token 600, and data.tokenizer.path has 259 tokens"):
        prepare(spec_of(make_spec, prefix, tmp_path), store)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DataError, match=r"a\.bin: has no \.idx next to it"):
        prepare(spec_of(make_spec, prefix, tmp_path), store)
    with pytest.raises(MissingError):
        prepare(spec_of(make_spec, tmp_path / "b", tmp_path), store)


def test_filters_see_the_text_and_an_end_inside_is_named(
    encoded: list[list[int]], store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    encoded[0] = encoded[0][:3]
    encoded[1][4] = encoded[1][-1]
    prefix = written(tmp_path / "a", encoded)
    rules = {"min_characters": 10, "on_bad_record": "skip"}
    prepared = prepare(spec_of(make_spec, prefix, tmp_path, cleaning=rules), store)
    assert prepared.dropped == {"end_in_text": 1, "too_short": 1}
    assert prepared.examples["end_in_text"].place.endswith("a.bin: document 2")


def test_an_index_that_lies_is_refused_before_memory_is_taken(
    encoded: list[list[int]], store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    prefix = written(tmp_path / "a", encoded)
    raw = (tmp_path / "a.idx").read_bytes()
    for at in range(9, 180, 4):  # the header, and the lengths of the first sequences
        (tmp_path / "a.idx").write_bytes(raw[:at] + struct.pack("<I", 2**31 - 5) + raw[at + 4 :])
        with pytest.raises(DataError):
            prepare(spec_of(make_spec, prefix, tmp_path), store)
    (tmp_path / "a.idx").write_bytes(raw)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-50])
    with pytest.raises(DataError, match="ends before the last token"):
        prepare(spec_of(make_spec, prefix, tmp_path), store)
