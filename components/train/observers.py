"""Everything about a step that is not the step: history, progress lines, system metrics.

Observers see each finished step and each commit. None of them can change the state, and none reads the device unless it
has to.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch

from holdfast.components.checkpoint import Attempt
from holdfast.components.spec.errors import DivergedError
from holdfast.components.store import Store
from holdfast.components.telemetry import Row, emit, events, write_segment
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.engine import StepOutput

log = logging.getLogger("holdfast.train")


@dataclass(frozen=True)
class FinishedStep:
    """A finished optimizer step, as observers see it."""

    step: int  # optimizer steps done
    learning_rate: float
    output: StepOutput
    finished: float  # unix seconds
    digest: str | None = None  # of the state after it, where one was computed


class Observer(Protocol):
    """Something that watches the loop."""

    def on_step(self, finished: FinishedStep) -> None:
        """After every optimizer step."""

    def on_save(self, step: int) -> None:
        """Before the state after `step` is saved. An exception here keeps it from being saved."""


class History:
    """Keeps a row for every step until the checkpoint that covers it commits; refuses to save what has diverged."""

    def __init__(self, spec: Assignment, start: int, keep: bool = True) -> None:
        """`keep`: whether this rank is the one that writes the rows; the others only refuse what has diverged."""
        self._tokens_per_step = spec.training.global_batch * spec.model.context
        self._written, self._keep = start, keep
        self._pending: list[FinishedStep] = []
        self._rows: list[Row] = []
        self._last: tuple[int, float] | None = None
        self._system = SystemMetrics()

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        self._pending.append(finished)

    def on_save(self, step: int) -> None:  # noqa: ARG002
        """See Observer. Raises DivergedError if any step since the last save was not finite."""
        self.latest()
        if not self._keep:
            self._rows.clear()

    def latest(self) -> Row | None:
        """Read what is pending from the device; the newest row."""
        if self._pending:
            losses = torch.stack([finished.output.loss for finished in self._pending]).tolist()
            norms = torch.stack([finished.output.grad_norm for finished in self._pending]).tolist()
            system = self._system.sample()
            for finished, loss, norm in zip(self._pending, losses, norms, strict=True):
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise DivergedError(
                        f"step {finished.step}: loss {loss}, gradient norm {norm}; the last checkpoint is kept. "
                        "Lower training.optimizer.learning_rate, lengthen training.schedule.warmup_steps, "
                        "or look at the data"
                    )
                self._rows.append(self._row(finished, loss, norm, system))
            self._pending.clear()
        return self._rows[-1] if self._rows else None

    def commit(self, store: Store, attempt: Attempt, step: int) -> None:
        """Write the rows up to `step`, on rank 0, just before its manifest. Runs beside `on_step`, in the thread that
        commits: it takes rows away in one operation, and `on_step` appends."""
        covered = [row for row in tuple(self._rows) if row["step"] <= step]
        write_segment(store, attempt.run_id, self._written, covered, attempt.number)
        self._written = step
        del self._rows[: len(covered)]

    def _row(self, finished: FinishedStep, loss: float, norm: float, system: dict[str, float]) -> Row:
        row: Row = {
            "step": finished.step,
            "time": finished.finished,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": finished.learning_rate,
            "tokens": finished.step * self._tokens_per_step,
            **system,
        }
        if finished.digest is not None:
            row["state_digest"] = finished.digest
        if self._last is not None and finished.finished > self._last[1]:
            steps = finished.step - self._last[0]
            row["tokens_per_second"] = steps * self._tokens_per_step / (finished.finished - self._last[1])
        self._last = (finished.step, finished.finished)
        return row


class Progress:
    """An event every `log_every` steps, and a line of it for a person who reads the log."""

    def __init__(self, spec: Assignment, history: History, start: int) -> None:
        self._steps, self._every, self._history = spec.training.steps, spec.training.log_every, history
        self._tokens_per_step = spec.training.global_batch * spec.model.context
        self._mark = (start, time.time())

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        if finished.step % self._every and finished.step != self._steps:
            return
        row = self._history.latest()
        assert row is not None
        step, then = self._mark
        rate = (finished.step - step) / max(1e-9, time.time() - then)
        self._mark = (finished.step, time.time())
        progress = events.Progress(
            step=finished.step,
            steps=self._steps,
            loss=row["loss"],
            grad_norm=row["grad_norm"],
            tokens_per_second=rate * self._tokens_per_step,
            seconds_left=(self._steps - finished.step) / rate,
        )
        log.info("%s", progress.text)
        emit(progress)

    def on_save(self, step: int) -> None:
        """See Observer."""


class SystemMetrics:
    """What the machine is doing, sampled where rows are read: no thread of its own."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """CPU use since the last sample in percent of all cores, memory in bytes."""
        sample: dict[str, Any] = {
            "system.cpu_percent": psutil.cpu_percent(),
            "system.rank0_memory_bytes": float(self._process.memory_info().rss),
            "system.memory_percent": psutil.virtual_memory().percent,
        }
        if torch.cuda.is_available():
            sample["system.gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        return sample
