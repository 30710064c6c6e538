"""How fast a step is: tokens a second, and MFU.

MFU is the share of the peak of all accelerators that the model's own arithmetic takes: FLOPs of a token (`6 N + 12 L D
T`, see `flops_per_token`) x tokens of a step / (seconds of the step x ranks x peak of one). What is computed a second
time does not count, nor does padding count less. Under adapters it is 4 N, as frozen weights have no gradient, and the
adapters' own products are left out. A peak is never guessed: it is the spec's or the table's.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.components.train.assignment import Assignment
from holdfast.model.initialise import flops_per_token
from holdfast.planning.hardware import by_device
from holdfast.spec.errors import SpecError


@dataclass(frozen=True)
class Throughput:
    """What one step is, in tokens and in the time that all accelerators together would need at their peak."""

    tokens: int
    flops: float  # that the model asks for in a step
    peak: float | None  # FLOP/s of all ranks together; None where it is not known
    unknown: str = ""  # why it is not known, and what to do about it

    @classmethod
    def of(cls, spec: Assignment, vocabulary: int, world: int, device: str) -> Throughput:
        """That of `world` ranks on devices that their driver calls `device`."""
        tokens = spec.training.global_batch * spec.model.context
        peak, unknown = _peak(spec, device)
        return cls(tokens, tokens * _flops(spec, vocabulary), None if peak is None else peak * world, unknown)

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step that took so long, from 0 to 1; None without a peak."""
        return None if self.peak is None or seconds <= 0 else self.flops / (seconds * self.peak)


def _flops(spec: Assignment, vocabulary: int) -> float:
    """FLOPs that one token asks for."""
    whole = flops_per_token(spec.model, vocabulary)
    reference = whole / 3 if spec.preferences else 0.0  # a forward pass of what the model began from
    if spec.training.lora.rank is None:
        return whole + reference
    elsewhere = whole - flops_per_token(spec.model, vocabulary, 1)  # attention to all places but its own
    attention = elsewhere * spec.model.context / max(1, spec.model.context - 1)
    return reference + attention + (whole - attention) * 4 / 6  # frozen weights have no gradient


def _peak(spec: Assignment, device: str) -> tuple[float | None, str]:
    """FLOP/s of one accelerator, or why they are not known."""
    if spec.telemetry.peak_tflops is not None:
        return spec.telemetry.peak_tflops * 1e12, ""
    remedy = "telemetry.peak_tflops says it"
    if (known := by_device(device)) is None:
        return None, f"the peak of {device} is in no table, and is not guessed; {remedy}"
    try:
        return known.peak(spec.training.precision), ""
    except SpecError:
        return None, f"the peak of {known.name} at {spec.training.precision} is in no table; {remedy}"
