"""Reading a checkpoint: boxes in, filled boxes out, for any layout that wrote it.

Each byte that reaches a tensor has the checksum in the index. Only indexes whose reach may meet the boxes are fetched.
Memory is bounded by READ_BYTES for each read under way and by INDEX_BYTES of indexes. After a failed checksum the bytes
are read once more. When they fail again, DamageError names the object.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from holdfast.checkpoint.box import DTYPES, TensorBox, grid
from holdfast.checkpoint.catalogue import Catalogue
from holdfast.checkpoint.damage_reports import DamageError, DamageReport
from holdfast.checkpoint.fetch import Fetch
from holdfast.checkpoint.index import Index, PackName, Place
from holdfast.checkpoint.lineage import require_counting
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.pieces import Use, meeting_shape, uses_of
from holdfast.checkpoint.root import UnfitError, root_data
from holdfast.checkpoint.tree import Entry, Node, Wanted, child_from_bytes
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout

log = logging.getLogger("holdfast.checkpoint")

READ_BYTES = 16 * 2**20  # neighboring pieces are read together up to this size
RENEW_SECONDS = 600.0  # interval between two signs of life of a mark
INDEX_BYTES = 256 * 2**20  # limit of the cached indexes


def read_manifest(store: Store, run_id: str, step: int) -> Manifest:
    """The root manifest of the checkpoint at `step`. Raises MissingError, DataError if it is damaged, UnfitError if a
    newer Holdfast wrote it."""
    key = layout.checkpoint(run_id, step)
    manifest = Manifest.from_bytes(root_data(store, run_id, step), key)
    if (manifest.run_id, manifest.step) != (run_id, step):
        raise DataError(f"{key}: is the manifest of run {manifest.run_id} at step {manifest.step}")
    return manifest


def open_checkpoint(store: Store, run_id: str, step: int) -> Checkpoint:
    """The checkpoint at `step`. Raises as `read_manifest`."""
    return Checkpoint(store, read_manifest(store, run_id, step))


def require_state(manifest: Manifest, state_digest: str) -> None:
    """Raises DataError if a checkpoint has another state digest than `state_digest`, unless that is empty."""
    if state_digest and manifest.state_digest != state_digest:
        raise DataError(
            f"run {manifest.run_id}: the checkpoint at step {manifest.step} was replaced by one with other bits while "
            "it was read; run the same command again"
        )


@dataclass(frozen=True)
class PieceInfo:
    """A piece of a tensor: its position there, and the digest of its content."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str
    place: Place


class Checkpoint:
    """One committed checkpoint, read lazily."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self.manifest = store, manifest
        self._cache: OrderedDict[str, tuple[int, Index | Node]] = OrderedDict()
        self._lock = threading.Lock()
        self._mark: tuple[str, bytes, float] | None = None  # key, content, and when it was written

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def tensors(self) -> Catalogue:
        """Its tensors by name, with their shapes and dtypes."""
        return self.manifest.tensors

    @property
    def is_marked(self) -> bool:
        """Whether a mark currently keeps it from being collected."""
        return self._mark is not None

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Keep it from being collected during a long read, by a mark that is renewed while it is read. For checkpoints
        that retention may not keep. Raises MissingError when a collector that saw no mark has deleted it, or a newer
        attempt has replaced its writer."""
        key = layout.reader(self.manifest.run_id, self.step, uuid.uuid4().hex)
        content = self.manifest.to_bytes()
        self._store.put(key, content)
        try:
            if read_manifest(self._store, self.manifest.run_id, self.step) != self.manifest:
                raise MissingError(f"{self._root}: another attempt has written it anew at this moment; open it again")
            require_counting(self._store, self.manifest)
            self._mark = key, content, time.monotonic()
            yield
        finally:
            self._mark = None
            self._store.delete(key)

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """Copy the checkpoint's values into `boxes`, in place. Raises UnfitError for boxes that do not fit, DamageError
        for data that does not verify."""
        self._renew_mark()
        Fetch(self._store, self.manifest.holder, READ_BYTES).fill(self.uses(boxes))

    def uses(self, boxes: Sequence[TensorBox]) -> list[Use]:
        """The pieces that `boxes` need. Raises as `fill`."""
        for box in boxes:
            self._require_fit(box)
        non_empty = [box for box in boxes if box.data.numel()]
        by_name: dict[str, list[TensorBox]] = defaultdict(list)
        for box in non_empty:
            by_name[box.name].append(box)
        uses = [use for key, index in self.leaves(non_empty) for use in uses_of(key, index, by_name)]
        covered = sum(prod(meeting_shape(use)) for use in uses)
        requested = sum(box.data.numel() for box in non_empty)
        if covered != requested:
            reason = f"{self._root}: its indexes hold {covered} of the {requested} requested elements"
            raise DamageError(DamageReport(reason, self._root))
        return uses

    def tensor(self, name: str) -> torch.Tensor:
        """One whole tensor, verified, on the CPU."""
        info = self.tensors[name]
        data = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self.fill([TensorBox.whole(name, data)])
        return data

    def rows(self, name: str, first: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """The rows of a tensor in [first, stop), verified, on the CPU; `stop` None means the end. Yields about
        READ_BYTES at a time, cut on the tensor's grid, so that each piece inside is read once."""
        info = self.tensors[name]
        if not info.shape:
            yield self.tensor(name)
            return
        axis, rows = grid(info.shape, info.itemsize)
        step = 1 if axis else rows
        step *= -(-READ_BYTES // max(1, step * prod(info.shape[1:]) * info.itemsize))
        stop = info.shape[0] if stop is None else stop
        for start in range(first // step * step, max(1, stop), step):
            low, high = max(first, start), min(start + step, stop)
            part = torch.empty((high - low, *info.shape[1:]), dtype=DTYPES[info.dtype])
            self.fill([TensorBox(name, info.shape, (low, *(0 for _ in info.shape[1:])), part)])
            yield part

    def pieces(self, name: str) -> list[PieceInfo]:
        """The pieces that make up a tensor, in the order of their offsets."""
        info = self.tensors[name]
        box = TensorBox.whole(name, torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta"))
        pieces = [
            PieceInfo(use.offset, use.shape, use.place.digest.hex(), use.place)
            for key, index in self.leaves([box])
            for use in uses_of(key, index, {name: [box]})
        ]
        return sorted(pieces, key=lambda piece: piece.offset)

    def packs(self) -> set[PackName]:
        """The packs that it needs."""
        packs: set[PackName] = set()
        for entry in self.manifest.indexes:
            packs.update(self.child(entry).pack_names)
        return packs

    def indexes(self) -> Iterator[str]:
        """The keys of all indexes that it needs, each node before its children."""
        waiting = list(self.manifest.indexes)
        while waiting:
            entry = waiting.pop(0)
            yield layout.index(self.manifest.holder, entry.name)
            if isinstance(child := self.child(entry) if entry.is_node else None, Node):
                waiting += child.entries

    def leaves(self, boxes: Sequence[TensorBox] | None = None) -> Iterator[tuple[str, Index]]:
        """The writers' indexes by their keys; with `boxes`, those that may overlap them."""
        yield from self._leaves(self.manifest.indexes, self.tensors, boxes)

    def child(self, entry: Entry) -> Index | Node:
        """The index or node of an entry of this checkpoint. Raises DamageError."""
        with self._lock:
            if (cached := self._cache.get(entry.name)) is not None:
                self._cache.move_to_end(entry.name)
                return cached[1]
        key = layout.index(self.manifest.holder, entry.name)
        child = fetch_child(self._store, key, entry)
        with self._lock:
            self._cache[entry.name] = (entry.size, child)
            while len(self._cache) > 1 and sum(size for size, _ in self._cache.values()) > INDEX_BYTES:
                self._cache.popitem(last=False)
        return child

    def _leaves(
        self, entries: Iterable[Entry], catalogue: Catalogue, boxes: Sequence[TensorBox] | None
    ) -> Iterator[tuple[str, Index]]:
        wanted_boxes = None if boxes is None else Wanted.of(boxes, catalogue)
        for entry in entries:
            if wanted_boxes is not None and not wanted_boxes.may_meet(entry.reach):
                continue
            child = self.child(entry)
            if isinstance(child, Node):
                yield from self._leaves(child.entries, child.catalogue, boxes)
            else:
                yield layout.index(self.manifest.holder, entry.name), child

    @property
    def _root(self) -> str:
        return layout.checkpoint(self.manifest.run_id, self.step)

    def _renew_mark(self) -> None:
        if self._mark is not None and time.monotonic() - self._mark[2] >= RENEW_SECONDS:
            key, content, _ = self._mark
            self._store.put(key, content)
            self._mark = key, content, time.monotonic()

    def _require_fit(self, box: TensorBox) -> None:
        info = self.tensors.get(box.name)
        if info is None or info.shape != box.global_shape or info.dtype != box.dtype_name:
            actual = f"{info.dtype} {list(info.shape)}" if info else "nothing"
            raise UnfitError(
                f"{box.name}: the checkpoint at step {self.step} holds {actual}, "
                f"the model needs {box.dtype_name} {list(box.global_shape)}"
            )


def fetch_child(store: Store, key: str, entry: Entry) -> Index | Node:
    """The index or node of an entry; read once more if it fails its checksum. Raises DamageError."""
    for is_retry in (False, True):
        try:
            return child_from_bytes(entry, store.get(key, most=entry.size), key)
        except UnfitError:
            raise
        except (DataError, MissingError) as error:
            if is_retry:
                raise DamageError(DamageReport(str(error), key, digest=entry.digest)) from error
    raise AssertionError
