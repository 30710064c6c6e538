"""Accelerator metrics of a run as a few lines, for `holdfast watch`, and for `holdfast show` while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.telemetry.accelerators import Figures
from holdfast.telemetry.events import AttemptBegan

NAMED = 8  # ranks with a throttled accelerator to name


def lines(newest: Mapping[int, Figures], began: AttemptBegan | None) -> Iterator[str]:
    """The latest driver metrics over all ranks, the throttled ranks, and the missing metrics of the attempt that
    `began`.

    Yields nothing if no driver reports anything.
    """
    told = [each for each in newest.values() if each.tells]
    if not told:
        return
    yield "accelerators: " + ", ".join(_together(told))
    slowed = {rank: newest[rank].slowed for rank in sorted(newest) if newest[rank].slowed}
    for rank in list(slowed)[:NAMED]:
        yield f"the accelerator of rank {rank} is held back: {slowed[rank]}"
    if len(slowed) > NAMED:
        yield f"and those of {len(slowed) - NAMED} other ranks"
    if began is not None and began.missing_metrics:
        yield "not told: " + ", ".join(f"{name} ({why})" for name, why in began.missing_metrics.items())


def _together(told: Sequence[Figures]) -> Iterator[str]:
    if busy := [each.utilisation for each in told if each.utilisation is not None]:
        yield f"{100 * sum(busy) / len(busy):.0f} % busy"
    if watts := [each.watts for each in told if each.watts is not None]:
        whole = f" ({sum(watts) / 1000:,.2f} kW)" if len(watts) > 1 else ""
        yield f"{sum(watts) / len(watts):,.0f} W each{whole}"
    fullest = max(
        ((each.memory_used, each.memory_total) for each in told if each.memory_used is not None and each.memory_total),
        key=lambda pair: pair[0] / pair[1],
        default=None,
    )
    if fullest is not None:
        yield f"{fullest[0] / 1e9:.1f} of {fullest[1] / 1e9:.1f} GB in the fullest"
    if heat := [each.celsius for each in told if each.celsius is not None]:
        yield f"{max(heat):.0f} °C the hottest"
    if clocks := [each.sm_megahertz for each in told if each.sm_megahertz is not None]:
        yield f"{min(clocks):,.0f} MHz the slowest"
