"""Measurements of a machine, as a file for `holdfast plan --calibration`.

A file of another format, or an incomplete one, is refused and never partly used. `pipelines.measure` measures, because
it has the ranks. The measurements cover one machine and no communication between nodes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from holdfast.planning.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    cost,
    point_to_point,
    reduce_scatter,
)
from holdfast.planning.hardware import Accelerator, Collective, Line, by_device
from holdfast.planning.layout import Layout
from holdfast.planning.practice import practice_here
from holdfast.planning.shape import Architecture
from holdfast.planning.speed import Speed, speed
from holdfast.runtime.environment import home
from holdfast.spec.errors import MissingError, Problem, SpecError
from holdfast.spec.section import Section

FORMAT: Literal[1] = 1
REMEDY = "make it anew: holdfast calibrate"
SECONDS = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "point_to_point": point_to_point,
}


class Machine(Section):
    """The measured machine."""

    device: str = Field(description="The accelerator or the processor, as its driver calls it.")
    kind: str = Field(description="`cluster.accelerator` of the spec.")
    processors: int = Field(ge=1, description="Cores that the ranks shared.")
    memory: float = Field(gt=0, description="Bytes of one rank: its accelerator's, or its share of the host's.")
    backend: str = Field(description="What the ranks talked over: gloo, nccl, hccl.")
    torch: str = Field(description="Version of torch.")
    ranks: int = Field(ge=1, description="Number of concurrent ranks.")


class Rates(Section):
    """The rates of one rank while all ranks compute."""

    fp32: float = Field(gt=0, description="FLOP/s of matrix products.")
    bf16: float = Field(gt=0, description="FLOP/s of matrix products.")
    attention: float = Field(gt=0, description="FLOP/s of attention at the precision of the step below.")
    bandwidth: float = Field(gt=0, description="Bytes a second of what is done element by element.")
    kernel_seconds: float = Field(gt=0, description="To start an operation.")


class Point(Section):
    """One measured message."""

    collective: Collective
    ranks: int = Field(ge=2)
    size: int = Field(ge=1, description="Bytes, as `planning.collectives` counts them.")
    seconds: float = Field(gt=0, description="The median, of the slowest rank.")
    fitted: bool = Field(
        description="Whether the line was fitted to it. The remaining points are used to judge the line."
    )


class Step(Section):
    """A measured step of the engine."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    context: int
    vocabulary: int
    global_batch: int
    micro_batch: int
    precision: Literal["fp32", "bf16"]
    strategy: Literal["ddp", "fsdp"]
    seconds: float = Field(gt=0, description="The median, of the slowest rank.")


class Calibration(Section):
    """All measurements of one calibration."""

    version: Literal[1] = FORMAT
    made: str = Field(description="When, in UTC.")
    machine: Machine
    rates: Rates
    points: tuple[Point, ...] = ()
    steps: tuple[Step, ...] = ()

    def accelerator(self) -> Accelerator:
        """The machine as the planner's accelerator.

        Unmeasured figures come from the table if it has the device. For another device, such as a CPU, a node is this
        machine, and its network counts as fast as its links.
        """
        rates, table_entry = self.rates, by_device(self.machine.device)
        ring = [line for line in self.lines() if line.collective == "point_to_point"]
        link = ring[0].beta if ring else rates.bandwidth
        if table_entry is None:
            return Accelerator(
                name=self.machine.device,
                kind=self.machine.kind,
                bf16=rates.bf16,
                fp32=rates.fp32,
                memory=self.machine.memory,
                bandwidth=rates.bandwidth,
                node=self.machine.ranks,
                link=link,
                network=link,
                watts=0,
                overhead_watts=0,
                reach=1.0,
                attention_reach=_share(rates.attention, self._peak()),
                bandwidth_reach=1.0,
                link_reach=1.0,
                kernel_seconds=rates.kernel_seconds,
                context=0.0 if self.machine.kind == "cpu" else 1.5e9,
                lines=self.lines(),
                source=f"measured {self.made}",
            )
        return table_entry.model_copy(
            update={
                "reach": _share(rates.bf16, table_entry.bf16),
                "attention_reach": _share(rates.attention, table_entry.bf16),
                "bandwidth_reach": _share(rates.bandwidth, table_entry.bandwidth),
                "kernel_seconds": rates.kernel_seconds,
                "lines": self.lines(),
                "source": f"{table_entry.source}; measured {self.made}",
            }
        )

    def _peak(self) -> float:
        return self.rates.bf16 if any(step.precision == "bf16" for step in self.steps) else self.rates.fp32

    def lines(self) -> tuple[Line, ...]:
        """The fitted line of each collective and group size, through the points with `fitted`."""
        chosen: dict[tuple[str, int], list[Point]] = {}
        for point in self.points:
            if point.fitted:
                chosen.setdefault((point.collective, point.ranks), []).append(point)
        return tuple(_line(points) for points in chosen.values())

    def predicted(self, point: Point) -> float:
        """Predicted seconds of a message."""
        return SECONDS[point.collective](point.size, Group(point.ranks, point.ranks, self.accelerator()))

    def step(self, step: Step) -> Speed:
        """The planner's prediction for a measured step."""
        ranks, full = self.machine.ranks, step.strategy == "fsdp" and self.machine.ranks > 1
        layout = Layout(
            data=ranks, shard=ranks if full else 1, micro_batch=step.micro_batch, sharding="full" if full else "none"
        )
        shape = Architecture(
            step.layers, step.hidden, step.heads, step.heads, step.ffn, step.context, step.vocabulary, tied=True
        )
        return speed(
            shape,
            layout,
            self.accelerator(),
            global_batch=step.global_batch,
            precision=step.precision,
            practice=practice_here(step.precision, layout, self.machine.kind),
            compiled=False,
        )

    def errors(self) -> dict[str, float]:
        """Prediction errors, as the mean of |predicted / measured - 1|: for each collective over the points that were
        not fitted, and for steps.
        """
        by_name: dict[str, list[float]] = {}
        for point in self.points:
            if not point.fitted:
                by_name.setdefault(point.collective, []).append(abs(self.predicted(point) / point.seconds - 1))
        for step in self.steps:
            by_name.setdefault("step", []).append(abs(self.step(step).seconds / step.seconds - 1))
        return {name: sum(values) / len(values) for name, values in by_name.items()}


def default_path() -> Path:
    """The path of this machine's calibration."""
    return home() / "calibration.json"


def write(calibration: Calibration, path: Path) -> None:
    """Write it atomically: a reader sees the whole file or the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(calibration.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> Calibration:
    """Read a calibration. Raises MissingError without a file, and SpecError for another format."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingError(f"{path}: cannot be read: {error.strerror}; make one: holdfast calibrate") from None
    except UnicodeDecodeError:
        raise SpecError([Problem("(file)", None, "is no text", REMEDY)], str(path)) from None
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, problem["loc"])) or "(file)", problem["input"], problem["msg"], REMEDY)
            for problem in error.errors(include_url=False)[:5]
        ]
        raise SpecError(problems, str(path)) from None


def _line(points: Sequence[Point]) -> Line:
    """Fit a line by least squares of the relative error over (rounds, bytes), so small messages weigh as much as large
    ones.

    Neither figure may be negative. If one would be, it is zero and the other one is fitted alone.
    """
    rows = [(*cost(point.collective, point.size, point.ranks), point.seconds) for point in points]
    scaled = [(rounds / seconds, moved / seconds) for rounds, moved, seconds in rows]
    aa, ab, bb = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, slope = 0.0, b1 / bb
    if determinant > 1e-12 * aa * bb:
        alpha, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha < 0:
            alpha, slope = 0.0, b1 / bb
        elif slope <= 0:
            alpha, slope = a1 / aa, 1e-15
    return Line(collective=points[0].collective, ranks=points[0].ranks, alpha=alpha, beta=1 / slope)


def _share(rate: float, peak: float) -> float:
    return min(1.0, rate / peak)
