"""Output of the planner: the best layouts, the reasons for the first one, and the estimate of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from holdfast.pipelines.view.terminal import SafeConsole, duration
from holdfast.planning import estimate_run, reasons
from holdfast.planning.auto import layout_of
from holdfast.planning.schedule import timeline as drawn
from holdfast.planning.search import MARGIN
from holdfast.planning.spot import in_words

if TYPE_CHECKING:
    from holdfast.planning import Candidate, Found, Spot, Task
    from holdfast.planning.calibration import Calibration
    from holdfast.planning.schedule import StageCosts
    from holdfast.spec import Spec

GB = 1e9
DAY = 86_400.0


def print_plan(
    name: str, task: Task, found: Found, refused: Sequence[str], mixes: Spot | None = None, *, timeline: bool
) -> None:
    """Print a plan. `refused`: why the engines do not run the first layout today; `mixes`: spot nodes."""
    console = SafeConsole(highlight=False)
    console = console if console.is_terminal else SafeConsole(width=150, highlight=False)
    shape, accelerator = task.shape, task.accelerator
    active = f" ({_count(shape.active_parameters)} active)" if shape.experts > 1 else ""
    console.print(
        f"{name}: {_count(shape.parameters)} parameters{active} on {task.gpus:,} x {accelerator.name}; a step is "
        f"{task.global_batch:,} x {shape.context:,} tokens in {task.precision}\n"
        f"{found.tried:,} layouts, of which {found.fitting:,} fit into {accelerator.memory * (1 - MARGIN) / GB:.0f} of "
        f"{accelerator.memory / GB:.0f} GB"
    )
    if not found.best:
        smallest = found.smallest
        console.print(
            f"\nNone fits. Least memory: {smallest.layout}, {smallest.memory.total / GB:.0f} GB, of which "
            f"{_shares(smallest.memory.terms, GB, ' GB')}.\nMore accelerators would share it."
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "tokens/s", "MFU", "memory", "step", "layout", "limit"):
        table.add_column(title, justify="right" if title in ("tokens/s", "MFU", "memory", "step") else "left")
    for number, candidate in enumerate(found.best, 1):
        table.add_row(str(number), *_row(candidate))
    if found.today is not None and found.today not in found.best:
        table.add_row("today", *_row(found.today))
    console.print()
    console.print(table)
    _print_best(console, found.best[0])
    for line in in_words(mixes) if mixes else ():
        console.print(line)
    if found.today is None:
        console.print("No layout that fits is run by the engines today.")
    if refused:
        console.print(f"The engines do not run the first one today: {'; '.join(refused)}.")
    if timeline:
        best = found.best[0].layout
        console.print()
        console.print(drawn(best, best.micro_batches(task.global_batch)), soft_wrap=True)


def print_stages(spec: Spec, costs: StageCosts, stages: list[int], *, timeline: bool) -> None:
    """Print measured stage costs, and the proposed stages."""
    console = SafeConsole(highlight=False)
    seconds, milli = costs.of_stages(stages), 1e3
    console.print(
        f"On {costs.device}, forward and backward, a micro-batch of {spec.training.micro_batch} x "
        f"{spec.model.context:,} tokens in {spec.training.precision}, the median in ms:\n"
        f"embedding {costs.embedding * milli:.2f}, a layer {costs.layer * milli:.2f}, "
        f"head and loss {costs.head * milli:.2f}"
    )
    spec_stages = spec.parallel.stages
    if spec_stages is not None:
        console.print(
            f"parallel.stages of the spec: {list(spec_stages)}, the slowest "
            f"{max(costs.of_stages(spec_stages)) * milli:.2f}"
        )
    console.print(
        f"parallel.stages: {stages} is the fastest split: the slowest stage takes {max(seconds) * milli:.2f}, all on "
        f"average {sum(seconds) / len(seconds) * milli:.2f}",
        soft_wrap=True,
    )
    if timeline:
        layout, ranks = layout_of(spec), spec.parallel.pipeline
        rank_seconds = [sum(seconds[rank::ranks]) for rank in range(ranks)]
        console.print()
        console.print(drawn(layout, spec.accumulation, costs=rank_seconds), soft_wrap=True)


def print_calibration(found: Calibration) -> None:
    """Print measurements, the fitted lines, and their predictions of other measurements."""
    console = SafeConsole(highlight=False)
    console = console if console.is_terminal else SafeConsole(width=150, highlight=False)
    machine, rates = found.machine, found.rates
    console.print(
        f"{machine.ranks} ranks on {machine.device} ({machine.processors} cores), {machine.backend}, torch "
        f"{machine.torch}\nwhile all compute, a rank: {rates.fp32 / GB:,.0f} GFLOP/s in fp32, {rates.bf16 / GB:,.0f} "
        f"in bf16, {rates.attention / GB:,.0f} in attention, {rates.bandwidth / GB:.1f} GB/s, "
        f"{rates.kernel_seconds * 1e6:.1f} us to start an operation\n"
    )
    lines = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("collective", "ranks", "alpha", "beta"):
        lines.add_column(title, justify="left" if title == "collective" else "right")
    lines.add_column("predicted / measured, of sizes that the line was not laid through")
    for line in found.lines():
        unseen = [
            f"{point.size / 2**10:,.0f} KiB: {found.predicted(point) / point.seconds:.2f}"
            for point in found.points
            if (point.collective, point.ranks, point.fitted) == (line.collective, line.ranks, False)
        ]
        beta = f"{line.beta / GB:.2f} GB/s"
        lines.add_row(line.collective, str(line.ranks), f"{line.alpha * 1e6:.0f} us", beta, ", ".join(unseen))
    steps = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("step", "micro-batch", "measured", "predicted", "predicted / measured"):
        steps.add_column(title, justify="left" if title == "step" else "right")
    for step in found.steps:
        seconds = found.step(step).seconds
        steps.add_row(
            f"{step.strategy}, {step.layers} x {step.hidden}, {step.precision}",
            str(step.micro_batch),
            f"{step.seconds * 1e3:.0f} ms",
            f"{seconds * 1e3:.0f} ms",
            f"{seconds / step.seconds:.2f}",
        )
    if machine.ranks > 1:
        console.print(lines)
        console.print()
    console.print(steps)
    errors = ", ".join(f"{name} {error:.0%}" for name, error in found.errors().items())
    console.print(f"\nmean error: {errors}")


def _print_best(console: Console, best: Candidate) -> None:
    run, task = estimate_run(best), best.task
    console.print("\nWhy the first one:")
    for reason in reasons(best):
        console.print(f"  {reason}")
    console.print(f"Memory, {best.memory.moment}: {_shares(best.memory.terms, GB, ' GB')}")
    console.print(f"A step: {_shares(best.speed.terms, best.speed.seconds / 100, ' %')}")
    carbon = "" if run.carbon is None else f" ({run.carbon / 1000:,.0f} kg of carbon dioxide)"
    console.print(
        f"The run: {task.steps:,} steps, {_count(task.tokens)} tokens: {_long(run.seconds)} with a goodput of "
        f"{run.goodput:.1%}; {run.gpu_hours:,.0f} GPU-hours, {run.energy:,.0f} kWh{carbon}"
    )
    console.print(
        f"It costs {run.cost:,.0f} at {task.accelerator.price:g} an hour, {run.cost_per_million_tokens:,.4g} a million "
        "tokens"
    )
    console.print(
        f"A failure every {_long(run.between_failures)}: save every {_long(run.interval)} "
        f"(checkpoint.every_steps: {run.steps_between})"
    )


def _row(candidate: Candidate) -> tuple[str, ...]:
    speed = candidate.speed
    return (
        f"{speed.tokens_per_second:,.0f}",
        f"{speed.mfu:.1%}",
        f"{candidate.memory.total / GB:.0f} GB",
        duration(speed.seconds),
        str(candidate.layout),
        candidate.limit,
    )


def _shares(terms: Mapping[str, float], unit: float, suffix: str) -> str:
    """The largest terms first, without those that round to zero."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {value / unit:.1f}{suffix}" for name, value in ordered if value / unit >= 0.05)


def _count(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:,.0f}"


def _long(seconds: float) -> str:
    return f"{seconds / DAY:,.1f} days" if seconds >= 2 * DAY else duration(seconds)
