"""Output of a simulation: a table in the terminal, and a page with charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from holdfast.pipelines.view.terminal import SafeConsole, duration

if TYPE_CHECKING:
    from holdfast.simulation import Bounds, ClusterModel, Job, Outcome

COLUMNS = tuple("policy, used, goodput, wait, p99, slow-down, fairness, fragments, lost h, evicted, cost".split(", "))


def progress(names: Sequence[str], quiet: bool) -> Iterator[str]:
    """Yield the names one after another, and show the current one on standard error."""
    console = SafeConsole(stderr=True, quiet=quiet)
    for number, name in enumerate(names, 1):
        with console.status(f"{name} ({number} of {len(names)})"):
            yield name


def print_outcomes(model: ClusterModel, jobs: Sequence[Job], outcomes: Sequence[Outcome], least: Bounds) -> None:
    """Print a table with a row per policy, after the bound that no policy can beat."""
    console = SafeConsole()
    console = console if console.is_terminal else SafeConsole(width=140)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    blank = [""] * (len(COLUMNS) - 4)
    table.add_row("(bound)", "", f"{least.utilisation:.1%}", duration(least.wait_mean), *blank, style="dim")
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    gpus = sum(job.gpus for job in jobs) / len(jobs)
    console.print(
        f"{model.name}: {model.gpus:,} accelerators, {len(jobs):,} jobs of {gpus:.1f} accelerators in the mean\n"
    )
    console.print(table)


def write_report(path: Path, model: ClusterModel, trace: str, outcomes: Sequence[Outcome], least: Bounds) -> None:
    """Write the page: the table, and for each policy the busy share of the cluster and the number of waiting jobs."""
    from jinja2 import Environment, PackageLoader

    from holdfast.pipelines.documents import write_whole

    page = Environment(loader=PackageLoader("holdfast.pipelines.view", "."), autoescape=True).get_template(
        "simulation.html"
    )
    text = page.render(
        model=model,
        trace=trace,
        columns=COLUMNS,
        rows=[_row(outcome) for outcome in outcomes],
        least=least,
        wait=duration(least.wait_mean),
        charts=[_chart(outcome) for outcome in outcomes],
    )
    write_whole(path, text)


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.policy,
        f"{outcome.utilisation:.1%}",
        f"{outcome.goodput:.1%}",
        duration(outcome.wait_mean),
        duration(outcome.wait_p99),
        f"{outcome.slowdown_mean:.2f}",
        f"{outcome.fairness:.2f}",
        f"{outcome.fragmentation:.0%}",
        f"{outcome.lost_hours:,.0f}",
        f"{outcome.evictions:,}",
        f"{outcome.cost:,.0f}",
    )


def _chart(outcome: Outcome, width: int = 720, height: int = 120) -> dict[str, object]:
    """The points of two lines: the busy share, and the waiting jobs relative to their maximum."""
    end = max(outcome.makespan, 1.0)
    max_waiting = max((waiting for _, _, waiting in outcome.curve), default=0) or 1
    first = outcome.curve[0][0] if outcome.curve else 0.0
    busy = " ".join(f"{(at - first) / end * width:.1f},{height * (1 - share):.1f}" for at, share, _ in outcome.curve)
    waiting = " ".join(
        f"{(at - first) / end * width:.1f},{height * (1 - count / max_waiting):.1f}" for at, _, count in outcome.curve
    )
    return {
        "policy": outcome.policy,
        "busy": busy,
        "waiting": waiting,
        "most": max_waiting,
        "span": duration(end),
        "width": width,
        "height": height,
    }
