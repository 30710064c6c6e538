"""Retention: which checkpoints stay, and the sweep of packs that no checkpoint needs.

Manifests go first, packs after, so that a crash in between leaves garbage and never a broken checkpoint. Packs of newer
attempts are never touched: a replaced writer cannot delete what its successor is about to commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from components.checkpoint.attempts import Attempt
from components.checkpoint.manifest import Manifest
from components.spec.errors import DataError, MissingError
from components.store import Store, layout


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last` checkpoints, and every one whose step is a multiple of `keep_every`."""

    keep_last: int
    keep_every: int | None = None

    def kept(self, steps: Iterable[int]) -> list[int]:
        """The steps to keep, oldest first."""
        ordered = sorted(steps)
        milestones = {step for step in ordered if self.keep_every and step % self.keep_every == 0}
        return sorted(milestones | set(ordered[-self.keep_last :]))


def checkpoint_steps(store: Store, run_id: str) -> list[int]:
    """The steps of all committed checkpoints, oldest first."""
    keys = (info.key.rsplit("/", 1)[1] for info in store.list(layout.run(run_id, "checkpoints/step-")))
    return sorted(int(name.removeprefix("step-").removesuffix(".json")) for name in keys)


def sweep(store: Store, attempt: Attempt, retention: Retention) -> None:
    """Delete the checkpoints that `retention` does not keep, then the packs that nothing reaches."""
    run_id = attempt.run_id
    attempt.check(store)
    steps = checkpoint_steps(store, run_id)
    kept = retention.kept(steps)
    for step in steps:
        if step not in kept:
            store.delete(layout.checkpoint(run_id, step))
    reached: set[str] = set()
    for step in kept:
        key = layout.checkpoint(run_id, step)
        try:
            reached |= Manifest.from_bytes(store.get(key), key).packs
        except MissingError:
            continue
        except DataError:
            return  # a damaged manifest may need any pack: sweep nothing until it has been dealt with
    for info in store.list(layout.run(run_id, "packs/")):
        name = info.key.rsplit("/", 1)[1].removesuffix(".pack")
        if name not in reached and int(name.split("-")[0]) <= attempt.number:
            store.delete(info.key)
