"""Throughput of a step: tokens per second, and MFU.

MFU is the share of all accelerators' peak that the model's arithmetic takes. It is FLOPs of a token (`6 N + 12 L D T`,
see `flops_per_token`) x tokens of a step / (seconds of the step x ranks x peak of one). Recomputation does not count,
and padding counts in full. With adapters it is 4 N, as frozen weights have no gradient, and the adapters' products are
left out. A peak is never guessed: it comes from the spec or the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engines.assignment import Assignment
from holdfast.model.initialise import flops_per_token
from holdfast.objectives.table import build_objective
from holdfast.planning.hardware import by_device
from holdfast.spec.errors import SpecError


@dataclass(frozen=True)
class Throughput:
    """The work of one step: tokens, model FLOPs, and the peak of all accelerators."""

    tokens: int
    flops: float  # of the model in a step
    peak: float | None  # FLOP/s of all ranks together; None if unknown
    unknown: str = ""  # why it is unknown, and the remedy

    @classmethod
    def of(cls, spec: Assignment, vocabulary: int, world: int, device: str) -> Throughput:
        """The throughput model of `world` ranks on devices with the driver's name `device`."""
        tokens = spec.training.global_batch * spec.model.context
        peak, unknown = _peak(spec, device)
        return cls(tokens, tokens * _flops(spec, vocabulary), None if peak is None else peak * world, unknown)

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilization of a step of this duration, from 0 to 1. None without a known peak."""
        return None if self.peak is None or seconds <= 0 else self.flops / (seconds * self.peak)


def _flops(spec: Assignment, vocabulary: int) -> float:
    """Model FLOPs of one token."""
    full = flops_per_token(spec.model, vocabulary)
    needs = build_objective(spec.objective, spec.training).needs
    reference = full / 3 if "reference" in needs else 0.0  # a forward pass of the reference model
    if "divergence" in needs:  # a forward pass of both models
        reference += 2 * full / 3
    if spec.training.lora.rank is None:
        return full + reference
    elsewhere = full - flops_per_token(spec.model, vocabulary, 1)  # attention to all positions but the token itself
    attention = elsewhere * spec.model.context / max(1, spec.model.context - 1)
    return reference + attention + (full - attention) * 4 / 6  # frozen weights have no gradient


def _peak(spec: Assignment, device: str) -> tuple[float | None, str]:
    """FLOP/s of one accelerator, or None with the reason."""
    if spec.telemetry.peak_tflops is not None:
        return spec.telemetry.peak_tflops * 1e12, ""
    remedy = "telemetry.peak_tflops says it"
    if (accelerator := by_device(device)) is None:
        return None, f"the peak of {device} is in no table, and is not guessed; {remedy}"
    try:
        return accelerator.peak(spec.training.precision), ""
    except SpecError:
        return None, f"the peak of {accelerator.name} at {spec.training.precision} is in no table; {remedy}"
