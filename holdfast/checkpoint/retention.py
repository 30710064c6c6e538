"""Retention of a run's checkpoints: the newest, the recent, the milestones, and the pinned ones stay.

Retention is a pure decision from a listing of the store; the collector deletes. Ages are by the store's clock alone,
counted back from the newest checkpoint, so that no host's clock can make a checkpoint old.

A pin protects a root and not a step. The root of a step can be replaced: a newer attempt that began below it commits
the step again, with other packs. So a pin contains the root that it means, as the mark of a reader does. The collector
keeps what each root in a pin needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, FiniteFloat, ValidationError

from holdfast.checkpoint.lineage import require_counting
from holdfast.checkpoint.root import Root, checkpoint_times, root_data, root_of
from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.rollout import Grpo
from holdfast.spec.training import Anomalies
from holdfast.store import ConflictError, Store, layout

PERSON = "person"  # the default holder of a pin
TRIES = 8  # limit for pinning while the root is replaced, or another process writes the pin's record
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
DAY_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last` checkpoints, those of the last `keep_days` days, and the first one at or after every
    multiple of `keep_every` steps. For each of these, also keep the one that a rewind from there needs: the one at the
    newest multiple of `rewind_steps`. Keep the records of answers from `answer_steps` steps before the oldest of
    them; None: all."""

    keep_last: int
    keep_every: int | None = None
    keep_days: float | None = None
    rewind_steps: int | None = None
    answer_steps: int | None = None

    @classmethod
    def of(cls, settings: Checkpoint, anomalies: Anomalies, grpo: Grpo | None = None) -> Retention:
        """The retention of a spec."""
        rewind_steps = anomalies.rewind_steps if anomalies.action == "rewind" else None
        answer_steps = None
        if grpo is not None and grpo.keep_steps is not None:
            answer_steps = grpo.keep_steps + grpo.updates - 1  # a checkpoint between two updates needs its answers
        return cls(settings.keep_last, settings.keep_every, settings.keep_days, rewind_steps, answer_steps)

    def kept(self, committed: Mapping[int, float], pinned: Iterable[int] = ()) -> list[int]:
        """The steps to keep, oldest first; see `reasons`."""
        return sorted(self.reasons(committed, pinned))

    def reasons(self, committed: Mapping[int, float], pinned: Iterable[int] = ()) -> dict[int, tuple[str, ...]]:
        """The reasons for each step that stays, in words. `committed` maps every step with a checkpoint to the time of
        its commit, in Unix seconds by the store's clock."""
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
            for step in {kept_step // self.rewind_steps * self.rewind_steps for kept_step in reasons} & set(steps):
                reasons.setdefault(step, []).append("a rewind would go back to it")
        return {step: tuple(texts) for step, texts in reasons.items()}


@dataclass(frozen=True)
class Pin:
    """Keeps a checkpoint from being collected."""

    step: int
    name: str  # its holder: a person, a registered model, or a run that began from it
    reason: str = ""
    created: float = 0.0  # Unix seconds


class PinRecord(BaseModel, frozen=True):
    """A pin as it is stored."""

    reason: str
    created: FiniteFloat
    roots: tuple[str, ...]  # as they were stored: usually one

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> PinRecord:
        """Read a stored pin. Raises DataError, with the remedy, for anything but a whole one."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DataError(
                f"{source}: the pin is damaged ({error.errors()[0]['msg']}), so nothing says which checkpoint it "
                "protects; take it away with `holdfast checkpoints unpin`, and pin again what is to stay"
            ) from None


def checkpoint_steps(store: Store, run_id: str) -> list[int]:
    """The steps of all committed checkpoints, oldest first."""
    return list(checkpoint_times(store, run_id))


def pinned_steps(store: Store, run_id: str) -> set[int]:
    """The steps with any pin. Reads no pin, so that a damaged one counts."""
    return {step for step, _ in _pins(store, run_id)}


def list_pins(store: Store, run_id: str) -> list[Pin]:
    """All pins of a run, by step."""
    pins = []
    for step, name in _pins(store, run_id):
        key = layout.pin(run_id, step, name)
        try:
            record = PinRecord.from_bytes(store.get(key), key)
            pins.append(Pin(step, name, record.reason, record.created))
        except MissingError:
            continue
        except DataError:
            pins.append(Pin(step, name, "its record is damaged, and it holds all the same"))
    return pins


def pin(store: Store, run_id: str, step: int, name: str = PERSON, reason: str = "", *, state_digest: str = "") -> Root:
    """Pin the checkpoint at `step` for `name`. Repeating is safe, and keeps what the pin protected before. With
    `state_digest`, the checkpoint must have these bits. Returns the description in its root.

    Raises MissingError when there is no such checkpoint, when it was collected at this moment, or when a newer attempt
    has replaced its writer. Raises DataError when it is damaged or has other bits.
    """
    root, _ = _pin(store, run_id, step, name, reason, state_digest, with_bytes=False)
    return root


def pin_bytes(store: Store, run_id: str, step: int, name: str, reason: str) -> bytes:
    """Pin what the checkpoint at `step` needs, in the run that holds it, and return the stored root that is pinned.
    Raises as `pin`."""
    return _pin(store, run_id, step, name, reason, "", with_bytes=True)[1]


def _pin(
    store: Store, run_id: str, step: int, name: str, reason: str, state_digest: str, *, with_bytes: bool
) -> tuple[Root, bytes]:
    """The pinned root, parsed and as it is stored.

    The root is read, the pin is written, and the root is read again. A collector deletes roots, then lists pins, then
    reads roots. If the second read finds a root that counts, one of two things is true. Either the pin was listed by
    the collector, or the collector still reads the root: see `docs/checkpoints.md`.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no pin: use letters, digits, '.', '_' and '-', at most 128")
    for _ in range(TRIES):
        data = _root_data(store, run_id, step)
        root = root_of(data, run_id, step)
        if state_digest and root.state_digest != state_digest:
            raise DataError(
                f"run {run_id}: the checkpoint at step {step} has the state digest {root.state_digest}, and "
                f"{state_digest} is meant; train the run again, or choose a step of it that has this state"
            )
        require_counting(store, root)
        key = layout.pin(root.holder if with_bytes else run_id, step, name)
        before, version = _stored(store, key)
        roots = dict.fromkeys([*before, data.decode()])
        record = PinRecord(reason=reason, created=time.time(), roots=tuple(roots))
        try:
            new_version = store.compare_and_swap(key, record.model_dump_json().encode(), version)
        except ConflictError:
            continue
        try:
            unchanged = _root_data(store, run_id, step) == data
            if unchanged:
                require_counting(store, root)
                return root, data
        except MissingError:
            _undo(store, key, new_version, before, record)
            raise
        _undo(store, key, new_version, before, record)
    raise MissingError(
        f"run {run_id}: other attempts wrote the checkpoint at step {step} anew {TRIES} times while it was pinned; "
        "try again once the run has gone on"
    )


def unpin(store: Store, run_id: str, step: int, name: str = PERSON) -> None:
    """Remove a pin; the next collection decides anew. Raises MissingError when it does not exist."""
    key = layout.pin(run_id, step, name)
    if store.stat(key) is None:
        holders = ", ".join(sorted(other for at, other in _pins(store, run_id) if at == step)) or "no holder"
        raise MissingError(f"step {step} of run {run_id} is not pinned by {name} (it is by: {holders})")
    store.delete(key)


def _root_data(store: Store, run_id: str, step: int) -> bytes:
    try:
        return root_data(store, run_id, step)
    except MissingError:
        steps = ", ".join(map(str, checkpoint_times(store, run_id))) or "none"
        raise MissingError(f"run {run_id} has no checkpoint at step {step} in {store.url} (it has: {steps})") from None


def _stored(store: Store, key: str) -> tuple[tuple[str, ...], str | None]:
    """The roots that a pin protects, and its version. Returns no roots for a damaged pin, and no version for a missing
    one."""
    try:
        data, version = store.get_versioned(key)
    except MissingError:
        return (), None
    try:
        return PinRecord.from_bytes(data, key).roots, version
    except DataError:
        return (), version


def _undo(store: Store, key: str, version: str, before: tuple[str, ...], record: PinRecord) -> None:
    """Restore what the pin protected before, unless another process has written it since."""
    if not before:
        if _stored(store, key)[1] == version:
            store.delete(key)
        return
    restored = record.model_copy(update={"roots": before})
    try:
        store.compare_and_swap(key, restored.model_dump_json().encode(), version)
    except ConflictError:
        return


def _pins(store: Store, run_id: str) -> list[tuple[int, str]]:
    matches = (re.search(r"/step-(\d{9,})/([^/]+)\.json$", info.key) for info in store.list(layout.pins(run_id)))
    return sorted((int(match[1]), match[2]) for match in matches if match)
