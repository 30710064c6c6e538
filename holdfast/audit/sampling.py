"""Sampled audit: computes seeded random stretches of runs again and compares them with the runs' records.

A stretch begins at a checkpoint. It ends at the next remaining one, or after `longest` steps. The result is written
under the run, so no audit repeats another. A difference is an event of the run.
"""

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.audit.records import AuditRecord, Stretch, audited_stretches, put_audit
from holdfast.audit.replay_job import ReplayResult, replay_steps
from holdfast.checkpoint import read_manifest
from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.components.train.step import GangError
from holdfast.runtime.node import node_name
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, ExitCode, MissingError, PlanChangedError, SpecError
from holdfast.store import Store
from holdfast.telemetry import emit, recording
from holdfast.telemetry.events import AuditDiffers


@dataclass(frozen=True)
class AuditResult:
    """A stretch that was computed again."""

    run_id: str
    stretch: Stretch
    found: ReplayResult


@dataclass(frozen=True)
class Refused:
    """A stretch that could not be computed, which is no difference."""

    run_id: str
    stretch: Stretch
    reason: str
    code: ExitCode


@dataclass(frozen=True)
class Audit:
    """The result of a sampled audit."""

    seed: int
    audited: tuple[AuditResult, ...]
    refused: tuple[Refused, ...]
    left: int  # stretches that were neither

    @property
    def code(self) -> ExitCode:
        """Exit code 6 for a difference. If nothing could be computed, the code of the first refusal."""
        if any(not result.found.none for result in self.audited):
            return ExitCode.MISMATCH
        return self.refused[0].code if self.refused and not self.audited else ExitCode.OK


def audit(
    store: Store,
    runs: Mapping[str, Spec],
    sample: int,
    seed: int,
    longest: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Audit:
    """Compute `sample` stretches of at most `longest` steps of these runs again, on this machine. The same seed
    draws the same sample from the same stretches. Call it from the main thread. Raises GangError if the ranks fail
    in a way that may pass."""
    drawn = [(run_id, entry) for run_id in sorted(runs) for entry in stretches(store, run_id, longest)]
    random.Random(seed).shuffle(drawn)  # noqa: S311 - a sample, not a secret
    results: list[AuditResult] = []
    refused: list[Refused] = []
    while drawn and len(results) < sample:
        run_id, stretch = drawn.pop(0)
        try:
            replayed = replay_steps(store, run_id, runs[run_id], stretch.start + 1, stretch.last, progress=progress)
        except (SpecError, DataError, MissingError, PlanChangedError, GangError) as error:
            if error.exit_code.retryable:
                raise
            refused.append(Refused(run_id, stretch, str(error), error.exit_code))
            if not isinstance(error, DataError | MissingError):  # this machine cannot compute the run
                drawn = [entry for entry in drawn if entry[0] != run_id]
            continue
        results.append(AuditResult(run_id, stretch, replayed))
        _tell(store, results[-1], seed)
    return Audit(seed, tuple(results), tuple(refused), len(drawn))


def stretches(store: Store, run_id: str, longest: int) -> list[Stretch]:
    """The committed stretches of a run that no audit has computed again yet, by steps."""
    if (newest := newest_step(store, run_id)) is None:
        return []
    history = read_manifest(store, run_id, newest).history
    all_stretches = []
    for start, end in itertools.pairwise([0, *counted_steps(store, run_id)]):
        last = min(end, start + longest)
        owners = [attempt for after, attempt in history if after < last]
        all_stretches.append(Stretch(start, last, owners[-1] if owners else 0))
    known = audited_stretches(store, run_id)
    return [stretch for stretch in all_stretches if stretch not in known]


def _tell(store: Store, done: AuditResult, seed: int) -> None:
    """Write the event, then the record. An audit that dies between the two is repeated."""
    result, host = done.found, node_name()
    differing = ", ".join(
        f"{difference.name} {difference.recorded!r} recorded, {difference.computed!r} here"
        for difference in result.differing
    )
    if result.first is not None:
        with recording(store, done.run_id, "audit"):
            emit(AuditDiffers(step=result.first, start=result.start, host=host, differing=differing))
    record = AuditRecord(done.stretch, time.time(), host, seed, result.figures, result.first, differing)
    put_audit(store, done.run_id, record)
