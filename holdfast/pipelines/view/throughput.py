"""Training speed of a run as a few lines: the latest reported figures, and the shares of the step phases."""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.telemetry import Event
from holdfast.telemetry.accelerators import Figures
from holdfast.telemetry.events import AttemptBegan, Progress
from holdfast.telemetry.phases import STEP_PHASES

SHOWN = 0.005  # share of a step below which a phase is omitted


def throughput(events: Sequence[Event]) -> Iterator[str]:
    """The newest figures in `events`, one line each; nothing before the first report."""
    progress = next((event for event in reversed(events) if isinstance(event, Progress)), None)
    if progress is None or progress.step_seconds is None:
        return
    speed = "" if progress.tokens_per_second is None else f"{progress.tokens_per_second:,.0f} tokens/s, "
    line = f"{speed}{_seconds(progress.step_seconds)} a step"
    if progress.mfu is not None:
        line += f", {100 * progress.mfu:.1f} % MFU"
    if progress.peak_memory:
        line += f", {progress.peak_memory / 1e9:.2f} GB at most on rank 0"
    yield line
    if total := sum(progress.phase_seconds.values()):
        shares = {name: progress.phase_seconds.get(name, 0.0) / total for name in STEP_PHASES}
        yield ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= SHOWN)
    began = next((event for event in reversed(events) if isinstance(event, AttemptBegan)), None)
    if progress.mfu is None and began is not None and began.mfu_unavailable:
        yield f"no MFU: {began.mfu_unavailable}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


# Accelerator metrics of a run as a few lines, for `holdfast watch`, and for `holdfast show` while it trains.

NAMED = 8  # ranks with a throttled accelerator to name


def lines(newest: Mapping[int, Figures], began: AttemptBegan | None) -> Iterator[str]:
    """The latest driver metrics over all ranks, the throttled ranks, and the missing metrics of the attempt that
    `began`.

    Yields nothing if no driver reports anything.
    """
    reporting = [figures for figures in newest.values() if figures.tells]
    if not reporting:
        return
    yield "accelerators: " + ", ".join(_together(reporting))
    slowed = {rank: newest[rank].slowed for rank in sorted(newest) if newest[rank].slowed}
    for rank in list(slowed)[:NAMED]:
        yield f"the accelerator of rank {rank} is held back: {slowed[rank]}"
    if len(slowed) > NAMED:
        yield f"and those of {len(slowed) - NAMED} other ranks"
    if began is not None and began.missing_metrics:
        yield "not reported: " + ", ".join(f"{name} ({reason})" for name, reason in began.missing_metrics.items())


def _together(reports: Sequence[Figures]) -> Iterator[str]:
    if busy := [figures.utilisation for figures in reports if figures.utilisation is not None]:
        yield f"{100 * sum(busy) / len(busy):.0f} % busy"
    if watts := [figures.watts for figures in reports if figures.watts is not None]:
        total = f" ({sum(watts) / 1000:,.2f} kW)" if len(watts) > 1 else ""
        yield f"{sum(watts) / len(watts):,.0f} W each{total}"
    fullest = max(
        (
            (figures.memory_used, figures.memory_total)
            for figures in reports
            if figures.memory_used is not None and figures.memory_total
        ),
        key=lambda pair: pair[0] / pair[1],
        default=None,
    )
    if fullest is not None:
        yield f"{fullest[0] / 1e9:.1f} of {fullest[1] / 1e9:.1f} GB in the fullest"
    if heat := [figures.celsius for figures in reports if figures.celsius is not None]:
        yield f"{max(heat):.0f} °C the hottest"
    if clocks := [figures.sm_megahertz for figures in reports if figures.sm_megahertz is not None]:
        yield f"{min(clocks):,.0f} MHz the slowest"
