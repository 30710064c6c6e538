"""Observers of the training loop: history with a digest of each step's samples, progress lines, system metrics.

Observers receive each finished step and each commit. They cannot change the state, and they read the device only when
necessary.

The digest of a step's samples covers the tokens handed to the engines, not the planned order, so readers of the
history can compare the two. It depends neither on the order of the samples nor on their division among ranks.
"""

import logging
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.checkpoint import Attempt
from holdfast.code.load import describe
from holdfast.code.resolve import bind, entered_folder
from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import StepOutput
from holdfast.rank.anomalies import Anomaly
from holdfast.rank.measure.energy_meter import Meter
from holdfast.rank.measure.throughput import Throughput
from holdfast.scoring.evaluations import StepScores
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import DivergedError
from holdfast.spec.functions import Function
from holdfast.telemetry import Row, emit, events, segment
from holdfast.telemetry.history import EVALUATION, OBJECTIVE, PHASE_SECONDS
from holdfast.telemetry.phases import Lap

log = logging.getLogger("holdfast.train")

UNTIMED = Lap({})
PEAK_MEMORY = "system.rank0_peak_memory_bytes"
METER_SECONDS = 5.0  # between two queries of the driver, which can take milliseconds
_MODULUS = 2**64


def samples_digest(rows: NDArray[np.int64]) -> int:
    """The sum over the rows (samples × tokens, and their scores) of 64 bits of each row's BLAKE3, modulo 2^64."""
    row_bytes: NDArray[np.uint8] = np.ascontiguousarray(rows, dtype="<i8").reshape(len(rows), -1).view(np.uint8)
    return sum(int.from_bytes(blake3(row.data).digest(8), "little") for row in row_bytes) % _MODULUS


class BatchDigest:
    """Digests this rank's batches, and sums the digests over all ranks."""

    def __init__(self, gang: Gang, *, speaks: bool) -> None:
        """`speaks` is true on one of the ranks that receive the same rows. Only that rank counts."""
        self._gang, self._speaks = gang, speaks
        self._own: dict[int, int] = {}  # of each finished step since the last flush

    def record(self, batches: Iterable[tuple[int, NDArray[np.int64]]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Digest the batches as they pass."""
        for step, rows in batches:
            self._own[step + 1] = samples_digest(rows) if self._speaks else 0
            yield step, rows

    def flush(self) -> dict[int, str]:
        """The digest of each step since the last call, in 16 hexadecimal digits. A collective call at the same step
        on all ranks."""
        parts = self._gang.all_gather(self._own, dict[int, int])
        self._own = {}
        return {step: f"{sum(part[step] for part in parts) % _MODULUS:016x}" for step in parts[0]}


@dataclass(frozen=True)
class FinishedStep:
    """A finished optimizer step as observers receive it."""

    step: int  # optimizer steps done
    learning_rate: float
    output: StepOutput
    finished: float  # unix seconds
    digest: str | None = None  # of the state after it, where one was computed
    lap: Lap = UNTIMED  # the time since the previous step finished


class Observer(Protocol):
    """A listener of the training loop."""

    def on_step(self, finished: FinishedStep) -> None:
        """Called after every optimizer step."""

    def on_save(self, step: int) -> Mapping[str, str]:
        """Called before the state after `step` is saved. Returns the objects (key -> text) to write just before its
        commit. An exception prevents the save."""


class History:
    """The history: one row per step, kept until the checkpoint that covers it commits. It refuses to save a diverged
    state."""

    def __init__(
        self,
        spec: Assignment,
        attempt: Attempt,
        start: int,
        fed: BatchDigest,
        keep: bool = True,
        throughput: Throughput | None = None,
        on_anomaly: Callable[[Anomaly], None] = lambda _: None,
        meter: Meter | None = None,
    ) -> None:
        """`keep` is true on the rank that writes the rows. Other ranks only refuse a diverged state and report their
        batch digests. `throughput` gives the work of a step, for MFU. `on_anomaly` receives the diverged step before it
        is refused. `meter` is that of this rank's accelerator."""
        self._attempt, self._batch_digest, self._on_anomaly = attempt, fed, on_anomaly
        self._sizes, self._context = BatchSizes.of(spec.training), spec.model.context
        self._throughput = throughput
        self._committed, self._keep = start, keep
        self._pending: list[FinishedStep] = []
        self._rows: list[Row] = []
        self._system = SystemMetrics(meter)
        self._scores: dict[str, float] = {}  # of the step before the next row

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        self._pending.append(finished)

    def evaluated(self, scores: StepScores) -> None:
        """Add the scores of a saved step to the row of the next step."""
        self._scores = {f"{EVALUATION}{name}": value for name, value in scores.figures.items()}
        self._scores |= {f"{EVALUATION}step": scores.step}
        if scores.loss is not None:
            self._scores[f"{EVALUATION}loss"] = scores.loss

    def on_save(self, step: int) -> Mapping[str, str]:
        """See Observer. Returns the rows of all steps since the newest commit. A collective call. Raises DivergedError
        if any step since the last save was not finite and its update was not held back."""
        self.latest()
        fed = self._batch_digest.flush()
        if not self._keep:
            self._rows.clear()
            return {}
        for row in tuple(self._rows):
            if row["step"] in fed:
                row["samples"] = fed[row["step"]]
        after = self._committed
        covered = [row for row in tuple(self._rows) if after < row["step"] <= step]
        return segment(self._attempt.run_id, after, covered, self._attempt.number)

    def committed(self, step: int) -> None:
        """Drop the rows up to `step`, which are committed. Runs in another thread concurrently with `on_step`. It
        removes rows in one operation, and `on_step` appends."""
        self._committed = step
        del self._rows[: sum(row["step"] <= step for row in tuple(self._rows))]

    def latest(self) -> Row | None:
        """Read pending values from the device. Returns the newest row, or None."""
        if self._pending:
            losses = torch.stack([finished.output.loss for finished in self._pending]).tolist()
            norms = torch.stack([finished.output.grad_norm for finished in self._pending]).tolist()
            flags = [finished.output.held for finished in self._pending]
            metrics = [
                {f"{OBJECTIVE}{name}": float(value) for name, value in finished.output.metrics.items()}
                for finished in self._pending
            ]
            held_flags = [None if flag is None else bool(flag) for flag in flags]
            system = self._system.sample() if self._keep else {}
            for finished, loss, norm, held_back, more in zip(
                self._pending, losses, norms, held_flags, metrics, strict=True
            ):
                if not held_back and not (math.isfinite(loss) and math.isfinite(norm)):
                    self._on_anomaly(Anomaly(finished.step - 1, loss, norm))
                    raise DivergedError(
                        f"step {finished.step}: loss {loss}, gradient norm {norm}; the last checkpoint is kept. "
                        "Lower training.optimizer.learning_rate, lengthen training.schedule.warmup_steps, "
                        "or look at the data"
                    )
                row = self._row(finished, loss, norm, system) | more
                if held_back is not None:
                    row["held"] = int(held_back)
                self._rows.append(row)
            self._rows[-1] |= _phases_of([finished.lap for finished in self._pending])
            self._pending.clear()
        return self._rows[-1] if self._rows else None

    def _row(self, finished: FinishedStep, loss: float, norm: float, system: dict[str, float]) -> Row:
        row: Row = {
            "step": finished.step,
            "time": finished.finished,
            "loss": loss if math.isfinite(loss) else None,  # None if the update of the step was held back
            "grad_norm": norm if math.isfinite(norm) else None,
            "learning_rate": finished.learning_rate,
            "tokens": self._sizes.before(finished.step) * self._context,
            **system,
            **self._scores,
        }
        self._scores = {}
        if finished.digest is not None:
            row["state_digest"] = finished.digest
        if (seconds := sum(finished.lap.seconds.values())) > 0:
            size = self._sizes.size(finished.step - 1)
            row["step_seconds"] = seconds
            row["tokens_per_second"] = size * self._context / seconds
            full_seconds = seconds * self._sizes.final / size  # scaled to the final batch size
            if self._throughput is not None and (mfu := self._throughput.mfu(full_seconds)) is not None:
                row["mfu"] = mfu
        return row


def _phases_of(laps: Sequence[Lap]) -> dict[str, float]:
    """Mean seconds of each phase over some steps, as fields of a row."""
    totals: Counter[str] = Counter()
    for lap in laps:
        totals.update(lap.seconds)
    return {f"{PHASE_SECONDS}{name}": seconds / len(laps) for name, seconds in totals.items()}


class Progress:
    """An event and a log line every `log_every` steps, and more often in a run that ends before."""

    def __init__(self, spec: Assignment, history: History, start: int, throughput: Throughput) -> None:
        self._steps, self._history = spec.training.steps, history
        every = spec.training.log_every
        self._every = every if every < self._steps else -(-self._steps // 10)  # at most ten lines in a short run
        self._sizes, self._throughput = BatchSizes.of(spec.training), throughput
        self._mark = (start, time.time())

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        if finished.step % self._every and finished.step != self._steps:
            return
        row = self._history.latest()
        assert row is not None
        step, mark_time = self._mark
        seconds = max(1e-9, time.time() - mark_time) / (finished.step - step)
        self._mark = (finished.step, time.time())
        full_seconds = (
            seconds * self._sizes.final / self._sizes.size(finished.step - 1)
        )  # scaled to the final batch size
        memory = row["system.gpu_memory_bytes" if "system.gpu_memory_bytes" in row else PEAK_MEMORY]
        progress = events.Progress(
            step=finished.step,
            steps=self._steps,
            loss=row["loss"],
            grad_norm=row["grad_norm"],
            tokens_per_second=self._throughput.tokens / full_seconds,
            seconds_left=(self._steps - finished.step) * seconds,
            learning_rate=finished.learning_rate,
            step_seconds=seconds,
            mfu=self._throughput.mfu(full_seconds),
            phase_seconds={
                name.removeprefix(PHASE_SECONDS): row[name] for name in row if name.startswith(PHASE_SECONDS)
            },
            peak_memory=int(memory),
        )
        log.info("%s", progress.text)
        emit(progress)

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}


class SystemMetrics:
    """System metrics, sampled when rows are read. It uses no thread."""

    def __init__(self, meter: Meter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock, self._measured_at = meter, clock, -math.inf
        self._process = psutil.Process(os.getpid())
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """CPU use since the last sample in percent of all cores, memory in bytes, and the driver's figures. The driver
        is queried at most every `METER_SECONDS`."""
        sample: dict[str, Any] = {
            "system.cpu_percent": psutil.cpu_percent(),
            "system.rank0_memory_bytes": float(self._process.memory_info().rss),
            PEAK_MEMORY: float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "system.memory_percent": psutil.virtual_memory().percent,
        }
        if torch.cuda.is_available():
            sample["system.gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())  # the peak
            sample["system.gpu_reserved_bytes"] = float(torch.cuda.max_memory_reserved())
        if self._meter is not None and self._clock() - self._measured_at >= METER_SECONDS:
            self._measured_at = self._clock()
            sample |= {f"system.gpu_{name}": value for name, value in self._meter.now() if value is not None}
        return sample


class UserObserver:
    """A function of user code that is called after each step. It must not change the training: one that fails is left
    out from then on."""

    def __init__(self, function: Function) -> None:
        """`function` is called with the step and its metrics. Raises UserCodeError if it cannot be imported."""
        self._use, self._function = function.use, bind(function)
        self._failed = False

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer. It reads the device, so that a step takes longer."""
        if self._failed:
            return
        output = finished.output
        metrics = {
            "loss": float(output.loss),
            "grad_norm": float(output.grad_norm),
            "learning_rate": finished.learning_rate,
        }
        try:
            self._function(finished.step, metrics)
        except Exception as error:  # noqa: BLE001 - of user code
            self._failed = True
            log.warning("%s: failed, and is left out: %s", self._use, describe(error, Path(entered_folder())))

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}
