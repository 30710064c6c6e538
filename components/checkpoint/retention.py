"""Retention: which checkpoints stay, and the sweep of packs that no checkpoint needs.

Manifests go first, packs after, so that a crash in between leaves garbage and never a broken checkpoint. Packs of newer
attempts are never touched: a replaced writer cannot delete what its successor is about to commit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.components.checkpoint.attempts import Attempt
from holdfast.components.checkpoint.manifest import Manifest
from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.store import Store, layout

log = logging.getLogger("holdfast.checkpoint")


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
    keys = (info.key for info in store.list(layout.run(run_id, "checkpoints/step-")))
    matches = (re.search(r"/step-(\d{9,})\.json$", key) for key in keys)  # whatever else lies there is not ours
    return sorted(int(match[1]) for match in matches if match)


def sweep(store: Store, attempt: Attempt, retention: Retention, committed: int) -> None:
    """Delete the checkpoints that `retention` does not keep, then the packs that nothing reaches. The one just
    `committed` stays in any case: later ones may be those of a replaced attempt, and the next save refers to it."""
    run_id = attempt.run_id
    attempt.check(store)
    steps = checkpoint_steps(store, run_id)
    kept = sorted({*retention.kept(steps), committed})
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
        except DataError as error:  # it may need any pack
            log.warning("%s; no pack is deleted while it lies there", error)
            return
    for info in store.list(layout.run(run_id, "packs/")):
        match = re.search(r"/((\d{6,})-[0-9a-f]{32})\.pack$", info.key)
        if match and match[1] not in reached and int(match[2]) <= attempt.number:
            store.delete(info.key)
