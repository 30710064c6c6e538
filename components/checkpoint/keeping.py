"""Which checkpoints of a run stay, and why: the newest, the young, the milestones, and those that somebody pinned.

A pure decision over what a listing of the store says; deleting is the collector's. Ages are by the store's clock alone,
counted back from the newest checkpoint, so that no clock of a host can make a checkpoint old.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.spec.training import Anomalies, Checkpoint
from holdfast.components.store import Store, layout

PERSON = "person"  # who pinned, where nobody else says
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
DAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last` checkpoints, those of the last `keep_days` days, and the first one at or after every
    multiple of `keep_every` steps; and for each of these the one that a rewind from there would need: that of the
    newest multiple of `rewind_steps`."""

    keep_last: int
    keep_every: int | None = None
    keep_days: float | None = None
    rewind_steps: int | None = None

    @classmethod
    def of(cls, settings: Checkpoint, anomalies: Anomalies) -> Retention:
        """What a spec keeps."""
        rewind_steps = anomalies.rewind_steps if anomalies.action == "rewind" else None
        return cls(settings.keep_last, settings.keep_every, settings.keep_days, rewind_steps)

    def kept(self, committed: Mapping[int, float], pinned: Iterable[int] = ()) -> list[int]:
        """The steps to keep, oldest first; see `reasons`."""
        return sorted(self.reasons(committed, pinned))

    def reasons(self, committed: Mapping[int, float], pinned: Iterable[int] = ()) -> dict[int, tuple[str, ...]]:
        """Why each step that stays does, in words. `committed` has every step that has a checkpoint, and when it was
        committed, in unix seconds by the store's clock."""
        steps = sorted(committed)
        reasons: dict[int, list[str]] = {}
        for step in steps[-self.keep_last :]:
            reasons.setdefault(step, []).append(f"one of the newest {self.keep_last}")
        if self.keep_days is not None and steps:
            since = max(committed.values()) - self.keep_days * DAY_SECONDS
            for step in steps:
                if committed[step] >= since:
                    reasons.setdefault(step, []).append(f"younger than {self.keep_days:g} days")
        if self.keep_every is not None:
            first = {step // self.keep_every: step for step in reversed(steps) if step >= self.keep_every}
            for step in first.values():
                reasons.setdefault(step, []).append(f"the first at or after a multiple of {self.keep_every}")
        for step in pinned:
            if step in committed:
                reasons.setdefault(step, []).append("pinned")
        if self.rewind_steps is not None:
            for step in {kept // self.rewind_steps * self.rewind_steps for kept in reasons} & set(steps):
                reasons.setdefault(step, []).append("a rewind would go back to it")
        return {step: tuple(why) for step, why in reasons.items()}


@dataclass(frozen=True)
class Pin:
    """Keeps a checkpoint from being collected, for as long as it is there."""

    step: int
    name: str  # who holds it: a person, or a registered model
    reason: str = ""
    created: float = 0.0  # unix seconds


def checkpoint_times(store: Store, run_id: str) -> dict[int, float]:
    """The steps of all committed checkpoints, oldest first, and when each was committed (unix seconds by the store's
    clock)."""
    found = {}
    for info in store.list(layout.run(run_id, "checkpoints/step-")):
        if match := re.search(r"/step-(\d{9,})\.json$", info.key):
            found[int(match[1])] = info.modified
    return dict(sorted(found.items()))


def checkpoint_steps(store: Store, run_id: str) -> list[int]:
    """The steps of all committed checkpoints, oldest first."""
    return list(checkpoint_times(store, run_id))


def pinned_steps(store: Store, run_id: str) -> set[int]:
    """The steps that are pinned, by whomever. Reads no pin, so that a torn one counts."""
    return {step for step, _ in _pins(store, run_id)}


def list_pins(store: Store, run_id: str) -> list[Pin]:
    """All pins of a run, by step."""
    found = []
    for step, name in _pins(store, run_id):
        try:
            told = json.loads(store.get(layout.pin(run_id, step, name)))
            found.append(Pin(step, name, str(told["reason"]), float(told["created"])))
        except MissingError:
            continue
        except (DataError, ValueError, KeyError, TypeError):
            found.append(Pin(step, name, "its record is torn, and it holds all the same"))
    return found


def pin(store: Store, run_id: str, step: int, name: str = PERSON, reason: str = "") -> None:
    """Pin a checkpoint for `name`; once more is fine. Raises MissingError when there is no such checkpoint, or it was
    collected at this moment: a collector looks at the pins again just before it deletes."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no pin: use letters, digits, '.', '_' and '-', at most 128")
    record = json.dumps({"reason": reason, "created": time.time()}).encode()
    store.put(layout.pin(run_id, step, name), record)
    if store.stat(layout.checkpoint(run_id, step)) is None:
        store.delete(layout.pin(run_id, step, name))
        steps = ", ".join(map(str, checkpoint_times(store, run_id))) or "none"
        raise MissingError(f"run {run_id} has no checkpoint at step {step} in {store.url} (it has: {steps})")


def unpin(store: Store, run_id: str, step: int, name: str = PERSON) -> None:
    """Take a pin away; the next collection decides anew. Raises MissingError when there is none."""
    key = layout.pin(run_id, step, name)
    if store.stat(key) is None:
        held = ", ".join(sorted(other for at, other in _pins(store, run_id) if at == step)) or "nobody"
        raise MissingError(f"step {step} of run {run_id} is not pinned by {name} (it is by: {held})")
    store.delete(key)


def _pins(store: Store, run_id: str) -> list[tuple[int, str]]:
    matches = (re.search(r"/step-(\d{9,})/([^/]+)\.json$", info.key) for info in store.list(layout.pins(run_id)))
    return sorted((int(match[1]), match[2]) for match in matches if match)
