"""The checkpoints of a run: what each cost, and why it is kept."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.lineage import counted_steps
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import read_manifest
from holdfast.checkpoint.retention import Pin, Retention, checkpoint_times, list_pins
from holdfast.spec.checkpoint import Checkpoint as Settings
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.rollout import Grpo
from holdfast.spec.training import Anomalies
from holdfast.store import Store, layout
from holdfast.store.sequence import newest, read_record


@dataclass(frozen=True)
class CheckpointInfo:
    """A row of a listing of checkpoints."""

    step: int
    committed: float  # Unix seconds, by the store's clock
    attempt: int = 0
    bytes: int = 0  # bytes of the state
    fresh: int = 0  # bytes that were written for it; earlier packs hold the rest
    tensors: int = 0
    writers: int = 0
    state_digest: str = ""
    kept: tuple[str, ...] = ()  # why retention keeps it; empty if the next collection removes it
    pins: tuple[Pin, ...] = ()
    damaged: str = ""  # what is wrong: quarantined, of a replaced attempt, or unreadable manifest


def retention_of(store: Store, run_id: str) -> Retention:
    """The retention of the run's newest launch; for a run that was never launched, the spec's defaults."""
    settings: Mapping[str, Any] = {}
    training: Mapping[str, Any] = {}
    if number := newest(store, layout.launches(run_id)):
        assignment = read_record(store, layout.launches(run_id), number).get("assignment") or {}
        settings = assignment.get("checkpoint") or {}
        training = assignment.get("training") or {}
    return Retention.of(
        Settings.model_validate(dict(settings)),
        Anomalies.model_validate(training.get("anomalies") or {}),
        Grpo.model_validate(training.get("grpo") or {}),
    )


def list_checkpoints(store: Store, run_id: str, retention: Retention) -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first, including quarantined ones. Raises MissingError when the run has none."""
    times, pins = checkpoint_times(store, run_id), defaultdict[int, list[Pin]](list)
    for pin in list_pins(store, run_id):
        pins[pin.step].append(pin)
    counted = set(counted_steps(store, run_id))
    reasons = retention.reasons({step: moment for step, moment in times.items() if step in counted}, pins)
    rows = []
    for step, committed in times.items():
        kept, held = reasons.get(step, ()), tuple(pins[step])
        try:
            manifest = read_manifest(store, run_id, step)
            replaced = "" if step in counted else f"does not count: attempt {manifest.attempt} was replaced"
            rows.append(_info(manifest, committed, kept, held, replaced))
        except MissingError:
            continue  # collected at this moment
        except DataError as error:
            rows.append(CheckpointInfo(step, committed, kept=kept, pins=held, damaged=str(error)))
    for info in store.list(layout.damaged(run_id)):
        if match := re.search(r"/step-(\d{9,})\.json$", info.key):
            reason = "set aside as damaged: two readers could not verify it"
            rows.append(CheckpointInfo(int(match[1]), info.modified, damaged=reason))
    if not rows:
        raise MissingError(f"run {run_id} has no checkpoint in {store.url} yet")
    return sorted(rows, key=lambda each: (each.step, each.damaged))


def _info(
    manifest: Manifest, committed: float, kept: tuple[str, ...], pins: tuple[Pin, ...], damaged: str
) -> CheckpointInfo:
    return CheckpointInfo(
        step=manifest.step,
        committed=committed,
        attempt=manifest.attempt,
        bytes=sum(info.elements * info.itemsize for info in manifest.tensors.values()),
        fresh=manifest.fresh,
        tensors=len(manifest.tensors),
        writers=manifest.writers,
        state_digest=manifest.state_digest,
        kept=kept,
        pins=pins,
        damaged=damaged,
    )
