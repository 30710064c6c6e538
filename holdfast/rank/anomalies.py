"""Anomaly detection: loss spikes and non-finite values, detected on the device within the step, handled one step late.

A step is an anomaly if its loss or gradient norm is not finite or far above the running mean. `judge` decides that
between the backward pass and the update. It uses numbers reduced over all ranks, so all ranks decide alike. Its result
is a tensor that the optimizer takes, so no host waits. The host reads it one step later, or before the state is saved
or digested, and applies `training.anomalies`.

The running statistics and counts are part of the state (`scalars`). A step has the number of its batch, whether its
update was applied or not. So the decision is a pure function of the state before the step, and any resumed run makes
the same one. `rewind` restores the checkpoint at the newest multiple of `rewind_steps` that is <= s, which is kept for
this, and skips the batches in between.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.engines.interface import Scalars
from holdfast.spec.errors import DivergedError
from holdfast.spec.training import Anomalies as Settings
from holdfast.telemetry import emit
from holdfast.telemetry.events import AnomalyFound

log = logging.getLogger("holdfast.train")

# The running statistics, by their names among the scalars of a checkpoint. Means and variances are those of the loss
# and the gradient norm. `seen` stops at the window.
KEPT = ("seen", "loss_mean", "norm_mean", "loss_variance", "norm_variance", "in_a_row", "found")
PREFIX = "anomalies."


@dataclass(frozen=True)
class Anomaly:
    """An anomalous step."""

    step: int  # optimizer steps done before it, which is the number of its batch
    loss: float
    norm: float


class Anomalies:
    """Detects anomalies and applies `training.anomalies`, step by step."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        scalars: Scalars = MappingProxyType({}),
        *,
        go_back: Callable[[int], Scalars] = lambda _: {},
        where: Callable[[int], str] | None = None,
    ) -> None:
        """`scalars` are those of the state that training continues from. `go_back(step)` restores the state after
        `step` steps on all ranks, and returns its scalars. `where(step)` describes where the samples of a batch are.
        Only the rank that reports anomalies has it."""
        self._settings, self._device, self._go_back, self._where = settings, device, go_back, where
        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self._pending: list[tuple[int, _AsyncScalar]] = []
        self._step = 0
        self._kept = torch.zeros(len(KEPT), device=device)
        self._blocked = torch.zeros((), dtype=torch.bool, device=device)
        self.restored(scalars)

    @property
    def enabled(self) -> bool:
        """Whether steps are judged. If only non-finite values end the run, its history detects them."""
        return self._settings.action != "stop" or self._settings.deviations is not None

    def saves(self, done: int) -> bool:
        """Whether the state after `done` steps must be a checkpoint, because a rewind may go back to it."""
        return self._settings.action == "rewind" and done % self._settings.rewind_steps == 0

    def restored(self, scalars: Scalars) -> None:
        """Restore the statistics from the scalars of a checkpoint. Without scalars, all start at zero."""
        values = [float(scalars.get(PREFIX + name, 0.0)) for name in KEPT]
        self._kept = torch.tensor(values, device=self._device)
        self._blocked = torch.zeros_like(self._blocked)
        self._pending.clear()

    def scalars(self) -> dict[str, float | int]:
        """The statistics, for the checkpoint. Reads the device."""
        if not self.enabled:
            return {}
        return {PREFIX + name: value for name, value in zip(KEPT, self._kept.tolist(), strict=True)}

    def begin_step(self, step: int) -> None:
        """Set the number of the batch that is judged next."""
        self._step = step

    def judge(self, loss: Tensor, norm: Tensor, excused: Tensor | None = None) -> Tensor | None:
        """See `Judge` in `holdfast.engines.interface`. A collective call, once per step."""
        if not self.enabled:
            return excused
        seen = torch.stack([loss.detach(), norm.detach()]).float()
        seen = torch.where(seen.isfinite(), seen, torch.inf)
        if self._several:
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        no = torch.zeros_like(self._blocked)
        excused_mask = no if excused is None else excused.bool()
        odd = ~(seen.isfinite().all() | excused_mask)
        count, means, variances, in_a_row, total = self._kept.split([1, 2, 2, 1, 1])
        if self._settings.deviations is not None:
            bound = means + self._settings.deviations * variances.sqrt()
            odd |= ((seen > bound).any() & (count[0] >= self._settings.window)) & ~excused_mask
        odd &= ~self._blocked  # after an anomaly that needs action, no step is judged until the host has acted
        held = odd | excused_mask | self._blocked
        after_good = self._after_a_good_one(in_a_row)
        passed = after_good if self._settings.action == "rewind" else in_a_row  # after a step held for another reason
        row = torch.where(excused_mask & ~self._blocked, passed, in_a_row + odd)
        self._kept = torch.where(
            held,
            torch.cat([count, means, variances, row, total + odd]),
            torch.cat([*self._taken(count, means, variances, seen), after_good, total]),
        )
        if self._settings.action != "skip":
            self._blocked = self._blocked | odd
        values = torch.stack([odd.float(), *seen, *self._kept[-2:]])
        self._pending.append((self._step, _AsyncScalar(values)))
        return held.float()

    def resolve(self, before: int) -> bool:
        """Act on the anomalies among the computed steps before step `before`. Returns whether the state was rewound,
        and all later steps must be computed again. A rewind is collective. Raises DivergedError if the spec says
        stop, or after too many consecutive anomalies."""
        while self._pending and self._pending[0][0] < before:
            step, answer = self._pending.pop(0)
            odd, loss, norm, in_a_row, total = answer.read()
            if not odd:
                continue
            anomaly = Anomaly(step, loss, norm)
            self.report(anomaly)
            self._require_few(anomaly, int(in_a_row))
            if self._settings.action == "rewind":
                target = step // self._settings.rewind_steps * self._settings.rewind_steps
                scalars = self._go_back(target)
                self.restored(scalars)
                self._kept[-2:] = torch.tensor([in_a_row, total])  # a rewind does not reset the counts of anomalies
                log.warning(
                    "step %d: the state is that of step %d again, and training continues behind it", step, target
                )
                return True
        return False

    def report(self, anomaly: Anomaly) -> None:
        """Report an anomaly and where its batch is. Only the reporting rank does."""
        if self._where is None:
            return
        event = AnomalyFound(
            step=anomaly.step + 1,
            action=self._settings.action,
            loss=f"{anomaly.loss:g}",
            grad_norm=f"{anomaly.norm:g}",
            batch=self._where(anomaly.step),
        )
        log.warning("%s", event.text)
        emit(event)

    def _taken(self, count: Tensor, means: Tensor, variances: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The statistics with one more step: plain means until the window is full, then exponential ones (West 1979,
        with a weight of at least 1/window)."""
        count = (count + 1).clamp(max=float(self._settings.window))
        delta = seen - means
        spread = (1 - 1 / count) * (variances + delta.square() / count)
        return count, means + delta / count, spread.nan_to_num()  # a value too large to square stays a number

    def _after_a_good_one(self, in_a_row: Tensor) -> Tensor:
        """The number of consecutive anomalies after a normal step. Rewinds stay consecutive until their interval is
        passed."""
        if self._settings.action == "rewind" and (self._step + 1) % self._settings.rewind_steps:
            return in_a_row
        return torch.zeros_like(in_a_row)

    def _require_few(self, anomaly: Anomaly, in_a_row: int) -> None:
        what = f"step {anomaly.step + 1}: loss {anomaly.loss:g}, gradient norm {anomaly.norm:g}"
        remedy = "Lower training.optimizer.learning_rate, lengthen training.schedule.warmup_steps, or look at the data"
        if self._settings.action == "stop":
            raise DivergedError(
                f"{what}: an anomaly, and training.anomalies.action says stop. The last checkpoint is kept. {remedy}, "
                "or let anomalies be skipped"
            )
        if in_a_row >= self._settings.max_consecutive:
            raise DivergedError(
                f"{what}: the {in_a_row}th anomaly in a row, and training.anomalies.max_consecutive allows fewer than "
                f"{self._settings.max_consecutive}. {remedy}"
            )


class _AsyncScalar:
    """A small tensor that is copied to the host asynchronously."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty_like(value, device="cpu", pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = value.cpu()

    def read(self) -> list[float]:
        """The numbers. Waits for the step that computes them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
