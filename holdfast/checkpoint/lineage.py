"""Which checkpoints count: those of the newest attempt that has committed, and those that it continued from.

A writer may freeze between its last check of the fence and the write of its root. It then commits when it resumes, long
after it was replaced, and the newer attempt may have collected what that root needs. No condition of a store prevents
this: the fence and the root are two objects. So such a root is no checkpoint. The newest checkpoint is that of the
newest attempt, not that of the highest step, and collection keeps nothing for a late root. Every checkpoint that counts
is complete at every moment.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from holdfast.checkpoint.attempts import list_attempts
from holdfast.checkpoint.root import Root, UnfitError, checkpoint_times, read_root
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store
from holdfast.store.commit_order import newest_of
from holdfast.store.parallel import in_parallel

log = logging.getLogger("holdfast.checkpoint")


class _Committed(Protocol):
    """A root, or its description without tensors."""

    @property
    def step(self) -> int: ...

    @property
    def attempt(self) -> int: ...

    @property
    def history(self) -> Sequence[tuple[int, int]]: ...


class _Named(_Committed, Protocol):
    """The same, with the run that it belongs to."""

    @property
    def run_id(self) -> str: ...


def newest_commit(store: Store, run_id: str, attempt: int | None = None) -> tuple[int, int] | None:
    """The attempt (0: its root cannot be read) and the step of the checkpoint that `newest_step` names."""
    step = newest_step(store, run_id, attempt)
    return None if step is None else (_attempt_of(store, run_id, step) or 0, step)


def newest_step(store: Store, run_id: str, attempt: int | None = None) -> int | None:
    """The step of the checkpoint that the run continues from, for attempt number `attempt` (None: a caller without
    one). None if there is none. The reader checks whether it is intact."""
    steps = list(checkpoint_times(store, run_id))
    if not steps:
        return None
    writers: dict[int, int | None] = {}

    def writer_of(step: int) -> int | None:
        writers[step] = _attempt_of(store, run_id, step)
        return writers[step]

    def claims(than: int) -> list[int]:
        return [number for number, _ in list_attempts(store, run_id, after=than)]

    newest = newest_of(steps, writer_of, claims, attempt)
    if newest != steps[-1]:
        log.warning(
            "step %d was committed by attempt %s after it had been replaced, and does not count: going on from step %d "
            "of attempt %s",
            steps[-1],
            writers[steps[-1]],
            newest,
            writers[newest],
        )
    return newest


def void_steps(committed: _Committed, writers: Mapping[int, int]) -> set[int]:
    """The steps of roots that do not count, given the newest checkpoint `committed`. `writers` maps the steps of a
    run's roots to the attempts that wrote them. The history of `committed` names the owner of each step; steps above it
    belong to newer attempts, or to none. The start step of an attempt may be its own: it commits the step that it
    loaded from a local tier."""

    def counts(step: int, writer: int) -> bool:
        if step > committed.step:
            return writer >= committed.attempt
        owners = [attempt for after, attempt in committed.history if after < step]
        return not owners or owners[-1] == writer or (step, writer) in committed.history

    return {step for step, writer in writers.items() if not counts(step, writer)}


def counted_steps(store: Store, run_id: str) -> list[int]:
    """The steps of the checkpoints that count, oldest first: without those that a replaced attempt wrote too late. The
    reader checks whether they are intact."""
    newest = newest_step(store, run_id)
    steps = [step for step in checkpoint_times(store, run_id) if newest is not None and step <= newest]
    if newest is None or len(list_attempts(store, run_id)) < 2 or (committed := _root(store, run_id, newest)) is None:
        return steps
    roots = in_parallel(lambda step: committed if step == newest else _root(store, run_id, step), steps)
    void = void_steps(committed, {root.step: root.attempt for root in roots if root is not None})
    return [step for step in steps if step not in void]


def require_counting(store: Store, root: _Named) -> None:
    """Raises MissingError for a root that exists and does not count: the attempt that wrote it was replaced."""
    newest = newest_step(store, root.run_id)
    if newest is None or newest == root.step or (committed := _root(store, root.run_id, newest)) is None:
        return
    if void_steps(committed, {root.step: root.attempt}):
        raise MissingError(
            f"run {root.run_id}: the checkpoint at step {root.step} is of attempt {root.attempt}, which was replaced, "
            f"and does not count: the newest one is that of step {newest}, of attempt {committed.attempt}; choose one "
            "of those that `holdfast checkpoints list` shows as kept"
        )


def _attempt_of(store: Store, run_id: str, step: int) -> int | None:
    """The attempt that wrote the root of a step; None if the root cannot be read."""
    root = _root(store, run_id, step)
    return None if root is None else root.attempt


def _root(store: Store, run_id: str, step: int) -> Root | None:
    for _ in range(2):  # a read may be bad
        try:
            return read_root(store, run_id, step)
        except UnfitError:
            return None
        except (DataError, MissingError) as error:
            log.warning("%s", error)
    return None
