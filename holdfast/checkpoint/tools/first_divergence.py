"""The first divergence of two runs: the first step whose figures differ, and the tensor and element, as precisely as
common checkpoints allow.

Histories are compared by the fields that are the same in every attempt, bit for bit, so two runs of the same
mathematics have no first step. Reads the roots of the common checkpoints, and tensors of one of them only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.checkpoint.reader import Checkpoint, open_checkpoint
from holdfast.checkpoint.tools.difference import Difference, ScalarDifference, differences, equal
from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.telemetry import Row, read_history
from holdfast.telemetry.history import PURE_FIELDS

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
    both = sorted(set(counted_steps(one.store, one.run_id)) & set(counted_steps(other.store, other.run_id)))
    equal_at, differs_at, difference = None, None, None
    for step in [each for each in both if each <= last]:
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
        found = open_checkpoint(side.store, side.run_id, step)
        marks.enter_context(found.marked())
    except MissingError:
        return None
    return found
