"""One writer's share of a save: its boxes become pieces, new pieces become packs, and an index locates them all.

The index appears after the packs it names. Content that the store already holds is not written again. A state that is
not finite is never written. The module knows no other writer: it takes plain CPU tensors, and the parent in the tree
finds the index.

A share references only content of its index in the newest committed checkpoint, or newer content. Collection keeps the
newest commit of its attempt and touches nothing newer. So it never removes what a save in flight references.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from blake3 import blake3

from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox, grid
from holdfast.checkpoint.catalogue import Catalogue, TensorInfo, coverage_of, merged
from holdfast.checkpoint.compress import Compression, Part
from holdfast.checkpoint.fingerprint import StateDigest, digest_of
from holdfast.checkpoint.index import (
    BOX,
    NO_BASE,
    PLACE,
    RUN,
    Boxes,
    Header,
    Index,
    PackName,
    Place,
    Run,
    Totals,
    pack_table,
)
from holdfast.checkpoint.packing import (
    Content,
    Laid,
    Piece,
    groups_of,
    hashed,
    is_tiled,
    laid_out,
    named,
    places_in,
)
from holdfast.checkpoint.reader import open_checkpoint
from holdfast.checkpoint.tiles import ways_of
from holdfast.spec.errors import DataError, DivergedError, HoldfastError, MissingError, StoreUnreachableError
from holdfast.store import Store, layout

log = logging.getLogger("holdfast.checkpoint")


def writer_name(writer: int) -> str:
    """The name of a writer's index, without its extension."""
    return f"{writer:05d}"


class ShardWriter:
    """The saves of writer number `writer` of an attempt."""

    def __init__(
        self, store: Store, attempt: Attempt, writer: int, *, threads: int = 1, compression: Compression | None = None
    ) -> None:
        """`threads` hash concurrently, without the interpreter lock. Without `compression`, content is stored
        as it is."""
        self._store, self._attempt, self._writer, self._threads = store, attempt, writer, threads
        self._compression = compression
        self._known: dict[Content, Place] = {}  # content -> its place in the last save or the loaded checkpoint

    def adopt(self, indexes: Iterable[Index]) -> None:
        """Continue from a checkpoint that was loaded and verified: reference the content of these indexes of it."""
        self._known = {(place.digest, dtype): place for index in indexes for dtype, place in index.known()}

    def recall(self, start: int, boxes: Sequence[TensorBox]) -> None:
        """Continue in a new process. Reference the last index that this writer wrote in this attempt. Without one,
        reference what the attempt's first checkpoint, at step `start`, holds of `boxes`. An older index is unsafe: a
        commit may have followed it, and then a collection. Content that cannot be read is written anew."""
        run_id, number = self._attempt.run_id, self._attempt.number
        own = f"/{writer_name(self._writer)}.idx"
        try:
            infos = self._store.list(layout.run(run_id, f"indexes/{number:06d}-"))
            if keys := sorted(info.key for info in infos if info.key.endswith(own)):
                self.adopt([Index.from_bytes(self._store.get(keys[-1]), keys[-1])])
            elif start and (began := open_checkpoint(self._store, run_id, start)).manifest.holder == run_id:
                self.adopt(index for _, index in began.leaves(boxes))
        except (MissingError, DataError) as error:
            log.warning("writer %d saves everything anew: %s", self._writer, error)

    def forget(self) -> None:
        """Write everything anew at the next save."""
        self._known = {}
        if self._compression is not None:
            self._compression.forget()

    def write(self, step: int, boxes: Sequence[TensorBox], digest: StateDigest | None = None) -> Index:
        """Make this writer's part of a step durable. `boxes` are on the CPU and share no element with each other or
        with another writer's. `digest` is theirs, where it has been computed already.

        Raises DivergedError for a state that is not finite. Raises FencedError when a referenced pack is gone and the
        attempt has been replaced, StoreUnreachableError when it is gone otherwise, and what the store raises.
        """
        boxes = sorted(boxes, key=lambda box: (box.name, box.offset))
        catalogue = merged(({box.name: _info(box)} for box in boxes), f"step {step}, writer {self._writer}")
        non_empty = [box for box in boxes if box.data.numel()]
        pieces = self._hashed(non_empty)
        places, fresh = self._placed(step, non_empty, pieces)
        totals = Totals(
            digest_of(boxes) if digest is None else digest,
            sum(
                (coverage_of(box.name, _info(box), box.offset, tuple(box.data.shape)) for box in non_empty),
                StateDigest(),
            ),
            sum(box.data.numel() for box in non_empty),
            fresh,
            1,
        )
        header = Header(step, self._attempt.number, self._writer, 0, totals)
        index = _index(header, catalogue, non_empty, [places[piece.content] for piece in pieces])
        if (stored := self._put(index)) is not index:
            self.forget()
            self.adopt([stored])
            return stored
        self._known = places
        if self._compression is not None:
            self._compression.keep(set(index.pack_names))
        return index

    def fail(self, step: int, error: HoldfastError) -> None:
        """Record that this writer's part of a step will not come, so that no other writer waits for it."""
        record_failure(self._store, self._attempt, step, writer_name(self._writer), error)

    def _hashed(self, boxes: Sequence[TensorBox]) -> list[Piece]:
        if self._threads <= 1:
            return [piece for number, box in enumerate(boxes) for piece in hashed(number, box)]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hash") as pool:
            return [piece for batch in pool.map(hashed, range(len(boxes)), boxes) for piece in batch]

    def _placed(
        self, step: int, boxes: Sequence[TensorBox], pieces: Sequence[Piece]
    ) -> tuple[dict[Content, Place], int]:
        """The place of each content, and the bytes written. Content that no earlier pack holds goes into new packs."""
        places: dict[Content, Place] = {}
        fresh: dict[Content, Piece] = {}
        for piece in pieces:
            if (known := self._known.get(piece.content)) is not None:
                places[piece.content] = known
            else:
                fresh.setdefault(piece.content, piece)
        for number in sorted({piece.box for piece in fresh.values()}):
            _require_finite(step, boxes[number])
        if self._compression is not None:
            self._compression.begin()
        looked = {each.pack for place in places.values() for each in (place, place.base) if each}
        self._require_packs(step, looked)
        bytes_written = 0
        for group in groups_of(list(fresh.values())):
            laid = self._laid(boxes, group)
            stored = [each.stored for each in laid]
            bases = {each.base.pack for each in stored if each.base} - looked
            self._require_packs(step, bases)
            looked |= bases
            contents = blake3(b"".join(map(named, group, laid))).digest(16)
            tables = b"".join(piece.digests for piece, each in zip(group, stored, strict=True) if is_tiled(each))
            pack = PackName(self._attempt.number, step, contents, len(tables) + sum(len(each.data) for each in stored))
            self._store.put(layout.pack(self._attempt.run_id, str(pack)), [tables, *(each.data for each in stored)])
            places.update(places_in(pack, len(tables), group, laid))
            bytes_written += pack.size
        self._remember(boxes, fresh.values(), places)
        return places, bytes_written

    def _laid(self, boxes: Sequence[TensorBox], pieces: Sequence[Piece]) -> list[Laid]:
        if self._compression is not None:
            return [Laid(stored) for stored in self._compression.stored([_part(boxes, piece) for piece in pieces])]
        return laid_out(pieces)

    def _remember(self, boxes: Sequence[TensorBox], pieces: Iterable[Piece], places: dict[Content, Place]) -> None:
        if self._compression is not None:
            for piece in pieces:
                self._compression.remember(_part(boxes, piece), boxes[piece.box].data.nbytes, places[piece.content])

    def _require_packs(self, step: int, packs: Iterable[PackName]) -> None:
        """Raises unless all packs are complete in the store, so no commit is unloadable. Retryable: the next attempt
        writes lost content anew."""
        for pack in sorted(packs):
            key = layout.pack(self._attempt.run_id, str(pack))
            info = self._store.stat(key)
            if info is None or info.size < pack.size:
                self._attempt.check(self._store)  # a newer attempt may have collected it
                state = "gone" if info is None else f"{info.size} bytes"
                raise StoreUnreachableError(
                    f"step {step}: {key} is {state} in {self._store.url}, and {pack.size} bytes were written: not "
                    "saving; something else deletes or truncates packs"
                )

    def _put(self, index: Index) -> Index:
        """Write the index. If it exists, this attempt wrote it in an earlier process. It stays, since a parent may have
        read it."""
        name = f"{self._attempt.number:06d}-{index.header.step:09d}/{writer_name(self._writer)}.idx"
        key, data = layout.index(self._attempt.run_id, name), index.to_bytes()
        if self._store.put_if_absent(key, data):
            return index
        other, own = Index.from_bytes(self._store.get(key), key), index.header.totals
        if (other.header.totals.digest, other.header.totals.coverage) != (own.digest, own.coverage):
            raise DataError(f"{key}: the same attempt saved other bits for the same step; keep the log and report it")
        return other


def record_failure(store: Store, attempt: Attempt, step: int, child: str, error: HoldfastError) -> None:
    """Write `<child>.failed`, the reason why a child of the tree will not come."""
    record = {"error": type(error).__name__, "message": str(error), "code": int(error.exit_code)}
    key = f"{layout.indexes(attempt.run_id, attempt.number, step)}{child}.failed"
    store.put(key, json.dumps(record).encode())


def _part(boxes: Sequence[TensorBox], piece: Piece) -> Part:
    box = boxes[piece.box]
    return Part((box.name, box.offset), piece.start, piece.data, box.dtype_name)


def _info(box: TensorBox) -> TensorInfo:
    return TensorInfo(box.global_shape, box.dtype_name)  # type: ignore[arg-type]


def _index(header: Header, catalogue: Catalogue, boxes: Sequence[TensorBox], places: Sequence[Place]) -> Index:
    numbers = {name: number for number, name in enumerate(catalogue)}
    dimensions = max((box.data.dim() for box in boxes), default=1) or 1
    table = np.zeros(len(boxes), dtype=BOX)
    offset = np.zeros((len(boxes), dimensions), dtype=np.int64)
    shape = np.ones((len(boxes), dimensions), dtype=np.int64)
    for row, box in enumerate(boxes):
        axis, rows = grid(box.global_shape, box.data.element_size())
        ways = ways_of(box.global_shape, axis, box.data.element_size())
        table[row] = (numbers[box.name], axis, ways, rows)
        offset[row, : box.data.dim()], shape[row, : box.data.dim()] = box.offset, box.data.shape
    packs = sorted({place.pack for each in places for place in (each, each.base) if place is not None})
    bases = sorted({place.base for place in places if place.base is not None})
    of_pack = {pack: number for number, pack in enumerate(packs)}
    runs = sorted({place.run for place in places if place.run is not None})
    of_base: dict[Place | Run | None, int] = {None: NO_BASE}
    of_base |= {each: number for table in (bases, runs) for number, each in enumerate(table)}
    return Index(
        header,
        catalogue,
        pack_table(packs),
        Boxes(table, offset, shape),
        _place_table(places, of_pack, of_base),
        _place_table(bases, of_pack, of_base),
        np.array(runs, dtype=RUN),
    )


def _place_table(
    places: Sequence[Place], packs: dict[PackName, int], bases: dict[Place | Run | None, int]
) -> np.ndarray:
    table = np.zeros(len(places), dtype=PLACE)
    table["pack"] = [packs[place.pack] for place in places]
    table["codec"] = [place.codec for place in places]
    table["start"] = [place.start for place in places]
    table["length"] = [place.length for place in places]
    table["base"] = [bases[place.run or place.base] for place in places]
    table["digest"] = np.frombuffer(b"".join(place.digest for place in places), dtype=np.uint8).reshape(-1, 16)
    return table


def _require_finite(step: int, box: TensorBox) -> None:
    """Raises DivergedError for a state that training could never recover from."""
    if box.data.is_floating_point() and box.data.numel():
        low, high = torch.aminmax(box.data)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DivergedError(
                f"step {step}: {box.name} is no longer finite (from {low.item()} to {high.item()}); not saved, "
                "the last checkpoint is kept. Lower training.optimizer.learning_rate or set training.clip_norm"
            )
