"""Retention: which checkpoints stay, and the sweep of packs that no checkpoint needs.

Manifests go first, packs after, so that a crash in between leaves garbage and never a broken checkpoint. Packs of newer
attempts are never touched, and the fence is checked before every group of deletions: a replaced writer cannot delete
what its successor has committed or is about to commit. What was set aside as damaged keeps its packs, for a person to
look at, until `keep_last` newer checkpoints are there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.components.checkpoint.attempts import Attempt
from holdfast.components.checkpoint.manifest import Manifest
from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.store import Store, layout

log = logging.getLogger("holdfast.checkpoint")

DELETE_GROUP = 16  # objects between two checks of the fence


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
    return _steps(store, layout.run(run_id, "checkpoints/"))


def sweep(store: Store, attempt: Attempt, retention: Retention, committed: int) -> None:
    """Delete the checkpoints that `retention` does not keep, then the packs that nothing reaches. The one just
    `committed` stays in any case: later ones may be those of a replaced attempt, and the next save refers to it.
    Raises FencedError when the attempt has been replaced, whatever is left to do."""
    run_id = attempt.run_id
    attempt.check(store)
    steps = checkpoint_steps(store, run_id)
    kept = sorted({*retention.kept(steps), committed})
    aside = layout.damaged(run_id)
    damaged = _steps(store, aside)
    released = [step for step in damaged if sum(other > step for other in kept) >= retention.keep_last]
    manifests = [layout.checkpoint(run_id, step) for step in steps if step not in kept]
    _delete(store, attempt, manifests + [layout.damaged(run_id, step) for step in released])
    doubted = tuple(layout.doubts(run_id, step) for step in kept)
    doubts = [key for key in _keys(store, layout.doubts(run_id)) if not key.startswith(doubted)]
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
    for step in damaged:
        try:
            reached |= Manifest.from_bytes(store.get(layout.damaged(run_id, step)), aside).packs
        except (MissingError, DataError):  # released, or torn itself: nothing says what it needs
            continue
    garbage = []
    for key in _keys(store, layout.run(run_id, "packs/")):
        match = re.search(r"/((\d{6,})-[0-9a-f]{32})\.pack$", key)
        if match and match[1] not in reached and int(match[2]) <= attempt.number:
            garbage.append(key)
    _delete(store, attempt, doubts + garbage)


def _delete(store: Store, attempt: Attempt, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), DELETE_GROUP):
        attempt.check(store)
        for key in keys[start : start + DELETE_GROUP]:
            store.delete(key)


def _keys(store: Store, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


def _steps(store: Store, folder: str) -> list[int]:
    """The steps of the manifests in a folder, oldest first; whatever else lies there is not ours."""
    matches = (re.search(r"/step-(\d{9,})\.json$", key) for key in _keys(store, f"{folder}step-"))
    return sorted(int(match[1]) for match in matches if match)
