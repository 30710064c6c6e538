"""Training speed of a run as a few lines: the latest reported figures, and the shares of the step phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.telemetry import Event
from holdfast.telemetry.events import AttemptBegan, Progress
from holdfast.telemetry.phases import STEP_PHASES

SHOWN = 0.005  # share of a step below which a phase is omitted


def throughput(events: Sequence[Event]) -> Iterator[str]:
    """The newest figures in `events`, one line each; nothing before the first report."""
    told = next((event for event in reversed(events) if isinstance(event, Progress)), None)
    if told is None or told.step_seconds is None:
        return
    line = f"{told.tokens_per_second:,.0f} tokens/s, {_seconds(told.step_seconds)} a step"
    if told.mfu is not None:
        line += f", {100 * told.mfu:.1f} % MFU"
    if told.peak_memory:
        line += f", {told.peak_memory / 1e9:.2f} GB at most on rank 0"
    yield line
    if whole := sum(told.phase_seconds.values()):
        shares = {name: told.phase_seconds.get(name, 0.0) / whole for name in STEP_PHASES}
        yield ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= SHOWN)
    began = next((event for event in reversed(events) if isinstance(event, AttemptBegan)), None)
    if told.mfu is None and began is not None and began.mfu_unavailable:
        yield f"no MFU: {began.mfu_unavailable}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
