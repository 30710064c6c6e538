"""Differences between two checkpoints, to the bit: which tensors, from which element on, and by how much.

Equal digests prove equality without a read. Otherwise, pieces with the same digest on both sides are not read either.
This holds for any writers, because no layout changes the grid of pieces.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod

import torch

from holdfast.checkpoint.box import DTYPES, TensorBox, grid
from holdfast.checkpoint.catalogue import TensorInfo
from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.checkpoint.reader import Checkpoint, open_checkpoint
from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.telemetry import Row, read_history
from holdfast.telemetry.history import PURE_FIELDS

# A tensor in parts of bounded size, to be read one after another.

PART_BYTES = 16 * 2**20


def parts_of(name: str, info: TensorInfo) -> Iterator[TensorBox]:
    """Boxes that make up a tensor, in the order of its rows, cut on its grid so that each piece is read once. All share
    the same memory, which the next one overwrites. Yields none for a tensor without elements."""
    dtype = DTYPES[info.dtype]
    if not info.shape:
        yield TensorBox.whole(name, torch.empty((), dtype=dtype))
        return
    axis, cut = grid(info.shape, info.itemsize)
    rows = 1 if axis else cut
    row_bytes = max(1, prod(info.shape[1:]) * info.itemsize)
    rows *= max(1, PART_BYTES // (rows * row_bytes))
    if not info.elements:
        return
    memory = torch.empty((min(rows, info.shape[0]), *info.shape[1:]), dtype=dtype)
    for first in range(0, info.shape[0], rows):
        place = (first, *(0 for _ in info.shape[1:]))
        yield TensorBox(name, info.shape, place, memory[: min(rows, info.shape[0] - first)])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TensorDifference:
    """A tensor with different bits in the two checkpoints."""

    name: str
    elements: int  # number of differing elements
    of: int
    first: tuple[int, ...]  # the index of the first of them, in row-major order
    values: tuple[float, float]  # at that index, in each of the two
    ulps: int | None  # between these two values, in floating-point steps; None for integers
    most_ulps: int | None  # between any two values


@dataclass(frozen=True)
class ScalarDifference:
    """A scalar that differs; None where one has none."""

    name: str
    values: tuple[float | int | None, float | int | None]


@dataclass(frozen=True)
class Difference:
    """All differences."""

    tensors: tuple[TensorDifference, ...] = ()
    scalars: tuple[ScalarDifference, ...] = ()
    only_one: tuple[str, ...] = ()  # tensors that the other does not have
    only_other: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()  # tensors of another shape or dtype, in words
    read: int = field(default=0, compare=False)  # bytes of tensors, of each of the two

    @property
    def none(self) -> bool:
        """Whether the states are the same, to the last bit."""
        return not (self.tensors or self.scalars or self.only_one or self.only_other or self.unlike)


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints have the same state by their digests, without reading tensors."""
    return one.tensors == other.tensors and one.manifest.state_digest == other.manifest.state_digest


def differences(
    one: Checkpoint, other: Checkpoint, progress: Callable[[int, int], None] = lambda *_: None
) -> Difference:
    """The differences between two checkpoints. `progress` is called with the bytes compared so far and the total.
    Raises DamageError for data that cannot be verified."""
    if equal(one, other):
        return Difference()
    unlike, tensors = [], []
    common = [name for name in one.tensors if name in other.tensors]
    total, done, read = sum(_bytes(one.tensors[name]) for name in common), 0, 0
    for name in common:
        mine, theirs = one.tensors[name], other.tensors[name]
        if mine != theirs:
            unlike.append(f"{name}: {mine.dtype} {list(mine.shape)}, and {theirs.dtype} {list(theirs.shape)}")
        else:
            difference = _Found(name, mine)
            for batch in _to_compare(one, other, name, mine):
                copies = [
                    TensorBox(box.name, box.global_shape, box.offset, torch.empty_like(box.data)) for box in batch
                ]
                one.fill(batch)
                other.fill(copies)
                for box, copy in zip(batch, copies, strict=True):
                    difference.add(box, copy)
                    read += box.data.nbytes
            if difference.elements:
                tensors.append(difference.result())
        done += _bytes(mine)
        progress(done, total)
    return Difference(
        tuple(tensors),
        tuple(_scalars(one, other)),
        tuple(name for name in one.tensors if name not in other.tensors),
        tuple(name for name in other.tensors if name not in one.tensors),
        tuple(unlike),
        read,
    )


def _bytes(info: TensorInfo) -> int:
    return info.elements * info.itemsize


def _to_compare(one: Checkpoint, other: Checkpoint, name: str, info: TensorInfo) -> Iterator[list[TensorBox]]:
    """The boxes of a tensor that may differ, some at a time."""
    mine, theirs = one.pieces(name), other.pieces(name)
    if [(piece.offset, piece.shape) for piece in mine] != [(piece.offset, piece.shape) for piece in theirs]:
        yield from ([part] for part in parts_of(name, info))  # a layout cut through a row here
        return
    batch: list[TensorBox] = []
    size = 0
    for piece, its in zip(mine, theirs, strict=True):
        if piece.digest == its.digest:
            continue
        batch.append(TensorBox(name, info.shape, piece.offset, torch.empty(piece.shape, dtype=DTYPES[info.dtype])))
        size += prod(piece.shape) * info.itemsize
        if size >= PART_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _scalars(one: Checkpoint, other: Checkpoint) -> Iterator[ScalarDifference]:
    mine, theirs = one.manifest.scalars, other.manifest.scalars
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield ScalarDifference(name, (mine.get(name), theirs.get(name)))


class _Found:
    """The differences of one tensor so far."""

    def __init__(self, name: str, info: TensorInfo) -> None:
        self._name, self._info = name, info
        self.elements = 0
        self._first: tuple[int, ...] | None = None
        self._values = (0.0, 0.0)
        self._ulps = 0
        self._most = 0

    def add(self, one: TensorBox, other: TensorBox) -> None:
        """Compare a box of the one with the same box of the other."""
        mine, theirs = (box.data.flatten().view(_BITS[box.data.element_size()]) for box in (one, other))
        differing = (mine != theirs).nonzero().flatten()
        if not len(differing):
            return
        self.elements += len(differing)
        at = int(differing[0])
        local_index = torch.unravel_index(torch.tensor(at), one.data.shape) if one.data.dim() else ()
        index = tuple(low + int(coordinate) for low, coordinate in zip(one.offset, local_index, strict=True))
        distances = _ulps(mine[differing], theirs[differing]) if one.data.is_floating_point() else None
        if distances is not None:
            self._most = max(self._most, int(distances.max()))
        if self._first is None or index < self._first:
            self._first, self._values = index, (one.data.flatten()[at].item(), other.data.flatten()[at].item())
            self._ulps = int(distances[0]) if distances is not None else 0

    def result(self) -> TensorDifference:
        """All of it."""
        assert self._first is not None
        floats = DTYPES[self._info.dtype].is_floating_point
        return TensorDifference(
            self._name,
            self.elements,
            self._info.elements,
            self._first,
            self._values,
            self._ulps if floats else None,
            self._most if floats else None,
        )


def _ulps(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The distance of two floats in floating-point steps, from their bits: int64, at most 2^63 - 1."""
    own, other = (_ordered(bits) for bits in (mine, theirs))
    distance = own - other
    overflown = ((own ^ other) & (own ^ distance)) < 0
    return torch.where(overflown, torch.full_like(distance, _LARGEST), distance.abs())


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bits of floats as integers in the order of the numbers; both zeros are 0."""
    least = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, least - wide, wide)


# The first divergence of two runs: the first step whose figures differ, and the tensor and element, as precisely as
# common checkpoints allow.
#
# Histories are compared bit for bit, by the fields that are the same in every attempt. So two runs of the same
# mathematics have no first step. Reads the roots of the common checkpoints, and tensors of one of them only.

COMPARED = (*PURE_FIELDS, "state_digest")


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    store: Store
    run_id: str


@dataclass(frozen=True)
class Divergence:
    """How far the bits of two runs agree."""

    steps: tuple[int, int]  # the last step that each has committed
    compared: int  # steps that were compared: those in both histories
    first: int | None  # the first of them whose figures differ
    figures: tuple[ScalarDifference, ...]  # differences of that step
    equal_at: int | None  # the newest common checkpoint before the states differ
    differs_at: int | None  # the first common checkpoint with other bits
    difference: Difference | None  # difference between the two checkpoints of that step

    @property
    def none(self) -> bool:
        """Whether they are the same in all common steps."""
        return self.first is None and self.differs_at is None


def find_divergence(one: Side, other: Side, progress: Callable[[int, int], None] = lambda *_: None) -> Divergence:
    """Compare two runs. `progress` is called with the bytes of tensors compared so far and the total. Raises
    MissingError when one run has committed nothing, DamageError for tensors that cannot be verified."""
    ends = []
    for side in (one, other):
        if (newest := newest_step(side.store, side.run_id)) is None:
            raise MissingError(
                f"run {side.run_id} has no checkpoint in {side.store.url} yet: there is nothing to compare"
            )
        ends.append(newest)
    mine, theirs = ({row["step"]: row for row in read_history(side.store, side.run_id)} for side in (one, other))
    common = sorted(mine.keys() & theirs.keys())
    first = next((step for step in common if _figures(mine[step], theirs[step])), None)
    figures = [] if first is None else _figures(mine[first], theirs[first])
    last = min(ends)
    common_checkpoints = sorted(
        set(counted_steps(one.store, one.run_id)) & set(counted_steps(other.store, other.run_id))
    )
    equal_at, differs_at, difference = None, None, None
    for step in [checkpoint_step for checkpoint_step in common_checkpoints if checkpoint_step <= last]:
        with ExitStack() as marks:
            pair = [_opened(side, step, marks) for side in (one, other)]
            if pair[0] is None or pair[1] is None:
                continue
            if equal(pair[0], pair[1]):
                equal_at = step
                continue
            differs_at, difference = step, differences(pair[0], pair[1], progress)
            break
    return Divergence((ends[0], ends[1]), len(common), first, tuple(figures), equal_at, differs_at, difference)


def _figures(mine: Row, theirs: Row) -> list[ScalarDifference]:
    return [
        ScalarDifference(name, (mine[name], theirs[name]))
        for name in COMPARED
        if name in mine and name in theirs and mine[name] != theirs[name]
    ]


def _opened(side: Side, step: int, marks: ExitStack) -> Checkpoint | None:
    """A checkpoint, kept from being collected meanwhile; None where it was collected at this moment."""
    try:
        checkpoint = open_checkpoint(side.store, side.run_id, step)
        marks.enter_context(checkpoint.marked())
    except MissingError:
        return None
    return checkpoint
