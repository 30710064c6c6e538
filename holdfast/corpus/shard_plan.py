"""Shard plan: a corpus divided into units for many machines, computed once by one process.

It is in the store under a digest of its content: the dataset id, the tokenizer, and every piece in order. It is stored
in chunks, so that a worker reads only its own. Shares are selected by number and count, for any count. So the pieces,
and all written bytes, do not depend on the number of workers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from holdfast.corpus.chat import template_name
from holdfast.corpus.decontamination import read_tasks
from holdfast.corpus.files import SourceFile
from holdfast.corpus.identity import dataset_settings
from holdfast.corpus.own import OwnFunctions
from holdfast.corpus.sources import ResolvedSource
from holdfast.corpus.tokenizer import Prepared as PreparedTokenizer
from holdfast.corpus.tokenizer import prepare as prepare_tokenizer
from holdfast.corpus.units import Job, Piece, plan
from holdfast.dataset.manifest import Lineage
from holdfast.runtime.logs import log
from holdfast.spec import digest
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json_object, parse_json_value
from holdfast.store import Store, layout

SHARD_PLAN_VERSION = 1
CHUNK_PIECES, CHUNK_FILES = 1024, 16384  # maximum per object
MAX_SHARES = 1024  # an Argo Workflow keeps a status for each in one object of etcd

_SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Origin:
    """The origin of a source's text."""

    uri: str
    lineage: Lineage


@dataclass(frozen=True)
class ShardPlan:
    """The units of a dataset (or a share of them), with everything needed to make and join them."""

    dataset_id: str
    sources: tuple[Origin, ...]
    pieces: Sequence[Piece]
    tokenizer: PreparedTokenizer

    def job(self, data: Data) -> Job:
        """The settings that all pieces share."""
        tokenizer = self.tokenizer
        name = template_name(data) if tokenizer.template else ""
        return Job(
            tokenizer.json,
            tokenizer.digest,
            tokenizer.dtype,
            tokenizer.end_of_text,
            data.cleaning,
            tokenizer.template,
            name,
            OwnFunctions.of(data),
            read_tasks(data.cleaning),
        )


def plan_shards(data: Data, dataset_id: str, sources: Sequence[ResolvedSource], store: Store) -> ShardPlan:
    """Divide the sources, and make the tokenizer. Raises DataError for data that cannot be used."""
    pieces = plan(sources, data.kind)
    total = sum(piece.bytes for piece in pieces)
    log.info("dataset %s: %d files, %d bytes", dataset_id, sum(len(source.files) for source in sources), total)
    for source in sources:
        for line in source.lineage.left_out_in_words():
            log.warning("%s: %s", source.source.uri, line)
    corpus = digest([[piece.key(None) for piece in pieces]])
    tokenizer = prepare_tokenizer(data, corpus, pieces, store)
    return ShardPlan(
        dataset_id, tuple(Origin(resolved.source.uri, resolved.lineage) for resolved in sources), pieces, tokenizer
    )


def save(division: ShardPlan, data: Data, store: Store, packed: int = 0) -> str:
    """Write the division into the store. Returns its name."""
    chunks = [_dumped(chunk) for chunk in _chunks(division.pieces)]
    tokenizer = asdict(division.tokenizer)
    text = tokenizer.pop("json")
    head = json.dumps(
        {
            "version": SHARD_PLAN_VERSION,
            "dataset_id": division.dataset_id,
            "settings": dataset_settings(data, packed),
            "sources": [{"uri": source.uri, "lineage": source.lineage.model_dump()} for source in division.sources],
            "tokenizer": tokenizer,
            "bytes": sum(piece.bytes for piece in division.pieces),
            "chunks": [
                {"digest": _digest(raw), "pieces": len(chunk), "bytes": sum(piece.bytes for piece in chunk)}
                for raw, chunk in zip(chunks, _chunks(division.pieces), strict=True)
            ],
        }
    ).encode()
    name = _digest(head)[:32]
    store.put(_key(name, "tokenizer.json"), text.encode())
    for number, raw in enumerate(chunks):
        store.put(_key(name, _chunk_name(number)), raw)
    store.put(_key(name, "division.json"), head)
    return name


def load(store: Store, name: str, data: Data, share: tuple[int, int] = (0, 1), packed: int = 0) -> ShardPlan:
    """The division `name`, with the pieces of `share`: its number, and the count of shares.

    Raises MissingError if it does not exist, and DataError if it is damaged or belongs to another spec.
    """
    if not _NAME.fullmatch(name):
        raise DataError(f"division {name!r}: is no name of a division; give the one that divide printed")
    raw = _read(store, name, "division.json")
    if _digest(raw)[:32] != name:
        raise _damaged(store, name, "division.json")
    head = parse_json_object(raw, f"division {name}")
    if head["settings"] != parse_json_object(json.dumps(dataset_settings(data, packed)), "settings"):
        raise DataError(f"division {name}: was made with other settings of `data` than this spec's; run divide again")
    text = _read(store, name, "tokenizer.json")
    if _digest(text) != head["tokenizer"]["digest"]:
        raise _damaged(store, name, "tokenizer.json")
    return ShardPlan(
        dataset_id=head["dataset_id"],
        sources=tuple(Origin(source["uri"], Lineage.model_validate(source["lineage"])) for source in head["sources"]),
        pieces=list(_share(store, name, head, *share)),
        tokenizer=PreparedTokenizer(json=text.decode(), **head["tokenizer"]),
    )


def parse_share(share: str) -> tuple[int, int]:
    """The number and the count of a share such as `3/8`. Raises DataError."""
    match = _SHARE.fullmatch(share)
    if match is None or int(match[1]) >= int(match[2]):
        raise DataError(f"share {share!r}: is not I/N with I from 0 to N - 1; write 0/8 for the first of eight shares")
    return int(match[1]), int(match[2])


def share_of(start: int, total: int, count: int) -> int:
    """The share, of `count`, of a piece that begins at byte `start` of `total`."""
    return min(count - 1, start * count // max(1, total))


def _share(store: Store, name: str, head: dict[str, Any], number: int, count: int) -> Iterator[Piece]:
    start, total = 0, head["bytes"]
    for index, chunk in enumerate(head["chunks"]):
        end = start + chunk["bytes"]
        if share_of(start, total, count) <= number <= share_of(end, total, count):
            raw = _read(store, name, _chunk_name(index))
            if _digest(raw) != chunk["digest"]:
                raise _damaged(store, name, _chunk_name(index))
            for piece in map(_loaded, parse_json_value(raw, f"division {name}")):
                if share_of(start, total, count) == number:
                    yield piece
                start += piece.bytes
        start = end


def _chunks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    files = 0
    for piece in pieces:
        chunk.append(piece)
        files += len(piece.files)
        if len(chunk) >= CHUNK_PIECES or files >= CHUNK_FILES:
            yield chunk
            chunk, files = [], 0
    if chunk:
        yield chunk


def _dumped(chunk: Sequence[Piece]) -> bytes:
    return json.dumps([asdict(piece) for piece in chunk]).encode()


def _loaded(fields: dict[str, Any]) -> Piece:
    part = fields.pop("range")
    files = tuple(SourceFile(**file) for file in fields.pop("files"))
    return Piece(**fields, files=files, range=tuple(part) if part else None)


def _read(store: Store, name: str, file: str) -> bytes:
    key = _key(name, file)
    if store.stat(key) is None:
        raise MissingError(f"{store.url}/{key}: is gone, or was never written; run divide again")
    return store.get(key)


def _damaged(store: Store, name: str, file: str) -> DataError:
    return DataError(f"{store.url}/{_key(name, file)}: is not what was written; run divide again, which rebuilds it")


def _key(name: str, file: str) -> str:
    return layout.unit(f"division-{name}", file)


def _chunk_name(number: int) -> str:
    return f"pieces-{number:06d}.json"


def _digest(raw: bytes) -> str:
    return blake3(raw).hexdigest()
