"""History of a script: one row per step with the metrics that the script gave."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.rank.observers import PEAK_MEMORY, SystemMetrics
from holdfast.script.tree import StateError
from holdfast.spec.errors import DivergedError
from holdfast.telemetry import Row, emit, events, segment
from holdfast.telemetry.phases import Lap

log = logging.getLogger("holdfast.script")

RESERVED = ("step", "time", "state_digest", "step_seconds", "samples", "tokens")
Metrics = Mapping[str, float | torch.Tensor]


class ScriptHistory:
    """Rows of steps, kept until the checkpoint that covers them commits. Values on a device are read when rows are."""

    def __init__(
        self, run_id: str, attempt: int, start: int, *, keep: bool, steps: int | None, log_every: int, diverges: bool
    ) -> None:
        """`keep` is true on the rank that writes the rows. `diverges`: whether a loss that is not finite ends the
        run."""
        self._run_id, self._attempt, self._committed, self._keep = run_id, attempt, start, keep
        self._steps, self._log_every, self._diverges = steps, log_every, diverges
        self._pending: list[tuple[Row, dict[str, float | torch.Tensor]]] = []
        self._rows: list[Row] = []
        self._early: dict[int, dict[str, float | torch.Tensor]] = {}  # metrics of steps to come
        self._system = SystemMetrics()
        self._mark = (start, time.time())
        self._last = start  # the newest step with a row

    def log(self, step: int, metrics: Metrics) -> None:
        """Add metrics to the row of a step, which may be the current one."""
        checked = {name: _checked(name, value) for name, value in metrics.items()}
        for row, values in self._pending:
            if row["step"] == step:
                values.update(checked)
                return
        if step > self._last:
            self._early.setdefault(step, {}).update(checked)
        else:
            log.warning("metrics of step %d came after it was saved, and are left out: %s", step, ", ".join(checked))

    def add(self, step: int, metrics: Metrics, digest: str | None, lap: Lap, epoch: int | None = None) -> None:
        """Add the row of a finished step. `epoch` is in it if the loop has epochs."""
        row: Row = {"step": step, "time": time.time()}
        if epoch is not None:
            row["epoch"] = epoch
        if digest is not None:
            row["state_digest"] = digest
        if (seconds := sum(lap.host.values())) > 0:
            row["step_seconds"] = seconds
        self._pending.append((row, self._early.pop(step, {})))
        self._last = step
        self.log(step, metrics)
        if self._keep and (step % self._log_every == 0 or step == self._steps):
            self._report(step)

    def segment(self, step: int) -> dict[str, str]:
        """The object with the rows up to `step`, to write just before its commit. Raises DivergedError."""
        self.read()
        if not self._keep:
            self._rows.clear()
            return {}
        after = self._committed
        covered = [row for row in tuple(self._rows) if after < row["step"] <= step]
        return segment(self._run_id, after, covered, self._attempt)

    def drain(self) -> list[Row]:
        """All rows so far, which are dropped here."""
        self.read()
        rows, self._rows = self._rows, []
        return rows

    def committed(self, step: int) -> None:
        """Drop the rows up to `step`. Runs in another thread concurrently with `add`."""
        self._committed = step
        del self._rows[: sum(row["step"] <= step for row in tuple(self._rows))]

    def read(self) -> None:
        """Read pending values from the device. Raises DivergedError for a loss that is not finite."""
        system = self._system.sample() if self._keep and self._pending else {}
        for row, values in self._pending:
            for name, value in values.items():
                number = float(value)
                if not math.isfinite(number) and name == "loss" and self._diverges:
                    raise DivergedError(
                        f"step {row['step']}: loss {number}; the last checkpoint is kept. Lower the learning rate, or "
                        "set train.determinism: off to continue in such a case"
                    )
                row[name] = number if math.isfinite(number) else None
            self._rows.append(row | system)
        self._pending.clear()

    def _report(self, step: int) -> None:
        self.read()
        row = self._rows[-1]
        begun, mark = self._mark
        seconds = max(1e-9, time.time() - mark) / max(1, step - begun)
        self._mark = (step, time.time())
        progress = events.Progress(
            step=step,
            steps=self._steps or step,
            loss=row.get("loss"),
            grad_norm=row.get("grad_norm"),
            learning_rate=row.get("learning_rate"),
            seconds_left=max(0, (self._steps or step) - step) * seconds,
            step_seconds=seconds,
            peak_memory=int(row[PEAK_MEMORY]),
        )
        log.info("%s", progress.text)
        emit(progress)


def _checked(name: str, value: Any) -> float | torch.Tensor:
    if name in RESERVED or name.startswith(("system.", "phase_seconds.")):
        raise StateError(f"the metric {name!r} has a name that Holdfast uses; rename it")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise StateError(f"the metric {name} is a tensor of {list(value.shape)}; give one number, such as its mean")
        return value.detach()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StateError(f"the metric {name} is {value!r:.80}; give a number") from None
