"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018) by torch's rule (`torch.amp.GradScaler`).

The state is on the device and small enough for the scalars of a checkpoint. fp16 gradients lose values below 6e-8, so
the loss is multiplied by a scale before the backward pass. Gradients are divided by it before anything reads them.
Scales are powers of two, so both operations are exact. A step with overflowing gradients is held back, and the scale is
halved. After `growth_interval` steps without overflow it is doubled.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.engines.interface import Scalars
from holdfast.spec.training import LossScale as Settings

SCALE, GROWTH = "loss_scale.scale", "loss_scale.growth_tracker"  # names among the scalars of a checkpoint
LEAST = 1.0  # a smaller scale does not help against an overflow at this one


class LossScale:
    """The loss scale of one engine."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._interval, self._first = settings.growth_interval, 2.0**settings.initial_power
        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self.scale = torch.full((), self._first, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def restored(self, scalars: Scalars) -> None:
        """Restore the scale from the scalars of a checkpoint. Without scalars, the initial scale applies."""
        self.scale.fill_(float(scalars.get(SCALE, self._first)))
        self._growth.fill_(int(scalars.get(GROWTH, 0)))

    def scalars(self) -> dict[str, float | int]:
        """The state to save. Reads the device."""
        return {SCALE: float(self.scale), GROWTH: int(self._growth)}

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def overflowed(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Check the norm of all gradients for overflow, and set the scale of the next step. A collective call.
        Returns two numbers, 1.0 or 0.0 and equal on all ranks: whether an overflow holds the update back, and
        whether a smaller scale may help."""
        overflow = (~norm.isfinite()).float()
        if self._several:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        recoverable = overflow * (self.scale > LEAST)
        torch._amp_update_scale_(self.scale, self._growth, overflow, 2.0, 0.5, self._interval)
        self.scale.clamp_(min=LEAST)
        return overflow, recoverable
