"""A collection that a person requests: the ranks' collector, in addition to them or instead of them, or a dry run.

It acts for the attempt that committed last, so it touches nothing newer. A later attempt may have claimed the run
without a commit yet, and may continue from any existing checkpoint. Then no checkpoint is deleted, only objects that no
checkpoint needs. An attempt that claims meanwhile fences the collection off, as it does the collector of a replaced
attempt.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from holdfast.checkpoint.attempts import Attempt, list_attempts
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.reader import read_manifest
from holdfast.checkpoint.retention import Retention, checkpoint_times
from holdfast.spec.errors import DataError, FencedError, MissingError
from holdfast.store import Data, ObjectInfo, Store
from holdfast.store.interface import WHOLE_BYTES

EVERYTHING = 1 << 62


@dataclass(frozen=True)
class Collected:
    """The objects that were deleted, or would be."""

    steps: tuple[int, ...]  # steps of the checkpoints
    objects: int
    bytes: int
    keys: tuple[str, ...]
    held_back: str = ""  # why not everything was deleted that retention releases


@dataclass(frozen=True)
class _Bystander(Attempt):
    """An attempt on whose behalf a process outside its gang acts. Only attempts that are newer than `known` fence it
    off."""

    known: int = 0  # the newest attempt when it began

    def check(self, store: Store) -> None:
        """See Attempt."""
        if (newest_claim := _newest_claim(store, self.run_id)) > self.known:
            raise FencedError(
                f"attempt {newest_claim} has claimed the run meanwhile and may resume from any checkpoint"
            )


def collect_now(store: Store, run_id: str, retention: Retention, *, dry_run: bool = False) -> Collected:
    """Collect what nothing keeps of a run; with `dry_run`, only report it. Raises MissingError when the run has no
    checkpoint, DataError when a manifest cannot be read, and what the store raises."""
    roots = []
    for step in checkpoint_times(store, run_id):
        try:
            roots.append(read_manifest(store, run_id, step))
        except MissingError:
            continue  # collected at this moment
        except DataError as error:
            raise DataError(
                f"{error}; nothing is collected while it lies there: see holdfast checkpoints verify"
            ) from None
    if not roots:
        raise MissingError(f"run {run_id} has no checkpoint in {store.url} yet")
    newest = max(roots, key=lambda root: (root.attempt, root.step))
    held_back = ""
    claimed = _newest_claim(store, run_id)
    if claimed > newest.attempt:
        held_back = f"attempt {claimed} has claimed the run and committed nothing yet, so no checkpoint is deleted"
        retention = replace(retention, keep_last=EVERYTHING)
    witness = _Witness(store, dry_run)
    bystander = _Bystander(run_id, newest.attempt, known=max(claimed, newest.attempt))
    try:
        Collector(cast(Store, witness), bystander, retention, folds=False).collect(newest.step)
    except FencedError as error:
        held_back = f"{error}, so the collection has stopped there"
    if not witness.leased:
        held_back = "another collector is at work on this run, so nothing was looked at; try again in a minute"
    steps = [int(match[1]) for key in witness.gone if (match := re.search(r"/checkpoints/step-(\d{9,})\.json$", key))]
    sizes = [witness.sizes.get(key, 0) for key in witness.gone]
    return Collected(tuple(sorted(steps)), len(sizes), sum(sizes), tuple(sorted(witness.gone)), held_back)


def _newest_claim(store: Store, run_id: str) -> int:
    return max((number for number, _ in list_attempts(store, run_id)), default=0)


class _Witness:
    """A store that records deletions. In a dry run it deletes and writes nothing, and its listings look as if
    it had."""

    def __init__(self, store: Store, rehearsal: bool) -> None:
        self._store, self._rehearsal = store, rehearsal
        self.sizes: dict[str, int] = {}
        self.gone: set[str] = set()
        self.leased = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """See Store."""
        for info in self._store.list(prefix, after):
            self.sizes[info.key] = info.size
            if not (self._rehearsal and info.key in self.gone):
                yield info

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """See Store."""
        if self._rehearsal and key in self.gone:
            raise MissingError(key)
        return self._store.get(key, start, length, most=most)

    def delete(self, key: str) -> None:
        """See Store."""
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """See Store."""
        self._remember(keys)
        if not self._rehearsal:
            self._store.delete_many(keys)

    def put_if_absent(self, key: str, data: Data) -> bool:
        """See Store. An object that is written again does not count as deleted."""
        self.gone.discard(key)
        return True if self._rehearsal else self._store.put_if_absent(key, data)

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """See Store."""
        version = "rehearsed" if self._rehearsal else self._store.compare_and_swap(key, data, expected)
        self.leased = True
        return version

    def end_abandoned(self, *arguments: Any, **options: Any) -> int:
        """See Store."""
        return 0 if self._rehearsal else self._store.end_abandoned(*arguments, **options)

    def _remember(self, keys: Iterable[str]) -> None:
        self.gone.update(keys)
