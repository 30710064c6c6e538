"""Accelerator metrics of the ranks: curves over the steps, and a table of the latest values."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from holdfast.pages.charts import Chart, Point, Series
from holdfast.telemetry.events import AttemptBegan, Event, TimeSpent

MOST_RANKS = 256  # ranks that get their own row
CURVES = (  # title, field, factor
    ("Accelerators, percent busy", "utilisation", 100.0),
    ("Power of an accelerator, watts", "watts", 1.0),
    ("Memory of an accelerator in use, GB", "memory_used", 1e-9),
    ("Temperature of an accelerator, °C", "celsius", 1.0),
)


@dataclass(frozen=True)
class Row:
    """The latest accelerator metrics of one rank; a field is empty where the driver does not report it."""

    rank: int
    busy: str
    watts: str
    memory: str
    celsius: str
    megahertz: str
    slowed: str


def accelerator_charts(events: Sequence[Event]) -> list[Chart]:
    """One chart for each reported metric: its mean and its maximum over all ranks."""
    reports = _by_step(events)
    charts = []
    for title, field, factor in CURVES:
        mean: list[Point] = []
        highest: list[Point] = []
        for step, ranks in reports.items():
            if values := [factor * value for report in ranks if (value := getattr(report, field)) is not None]:
                mean.append((step, sum(values) / len(values)))
                highest.append((step, max(values)))
        if mean:
            lines = [Series("highest", highest, "second"), Series("mean", mean, "third")]
            charts.append(Chart(title, lines, height=190, from_zero=True))
    return charts


def accelerator_rows(events: Sequence[Event]) -> list[Row]:
    """The latest accelerator metrics of each rank of the last attempt; empty where no driver reports any."""
    newest = newest_figures(events)
    return [_row(newest[rank]) for rank in sorted(newest)[:MOST_RANKS]]


def newest_figures(events: Sequence[Event]) -> dict[int, TimeSpent]:
    """The latest metrics of each rank of the last attempt, without ranks whose driver reports nothing."""
    newest: dict[int, TimeSpent] = {}
    world = next((event.world for event in reversed(events) if isinstance(event, AttemptBegan)), 0)
    for event in events:
        if isinstance(event, TimeSpent) and event.rank < world:
            newest[event.rank] = event
    return {rank: event for rank, event in newest.items() if event.tells}


def _by_step(events: Sequence[Event]) -> dict[int, list[TimeSpent]]:
    """All ranks' latest reports at each step where one of them reported. A repeated step keeps its last reports."""
    newest: dict[int, TimeSpent] = {}
    by_step: dict[int, list[TimeSpent]] = {}
    reports = (event for event in events if isinstance(event, AttemptBegan | TimeSpent))
    for step, same_step in groupby(reports, lambda event: event.step):
        for event in same_step:
            if isinstance(event, AttemptBegan):
                newest = {rank: report for rank, report in newest.items() if rank < event.world}
            else:
                newest[event.rank] = event
        by_step[step] = list(newest.values())
    return {step: by_step[step] for step in sorted(by_step)}


def _row(event: TimeSpent) -> Row:
    def shown(value: float | None, unit: str, factor: float = 1.0) -> str:
        return "" if value is None else f"{factor * value:,.0f} {unit}"

    used, total = event.memory_used, event.memory_total
    of_total = "" if total is None else f" of {total / 1e9:.1f}"
    return Row(
        rank=event.rank,
        busy=shown(event.utilisation, "%", 100),
        watts=shown(event.watts, "W"),
        memory="" if used is None else f"{used / 1e9:.1f}{of_total} GB",
        celsius=shown(event.celsius, "°C"),
        megahertz=shown(event.sm_megahertz, "MHz"),
        slowed=event.slowed,
    )
