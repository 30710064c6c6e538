"""Measurements of a machine: lines through points, a file that is refused unless it is complete, and real ranks."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.planning import calibration
from holdfast.planning.calibration import Calibration, Machine, Point, Rates, Step
from holdfast.planning.collectives import Group, all_gather, all_reduce, cost
from holdfast.spec.errors import MissingError, SpecError

ALPHA, BETA = 50e-6, 2e9
SIZES = (2**12, 2**16, 2**20, 2**24)


def measured(**machine: object) -> Calibration:
    """A machine whose collectives lie on one line, except that a gather of 1 MiB takes twice as long."""

    def seconds(collective: str, ranks: int, size: int) -> float:
        rounds, amount = cost(collective, size, ranks)
        return rounds * ALPHA + amount / BETA

    points = [
        Point(collective=name, ranks=ranks, size=size, seconds=seconds(name, ranks, size), fitted=True)
        for name in ("all_reduce", "all_gather", "point_to_point")
        for ranks in (2, 4)
        if ranks == 2 or name != "point_to_point"
        for size in SIZES
    ]
    last_point = Point(
        collective="all_gather", ranks=2, size=2**20, seconds=2 * seconds("all_gather", 2, 2**20), fitted=False
    )
    description = {"device": "a CPU", "kind": "cpu", "processors": 4, "memory": 4e9, "backend": "gloo", "torch": "2"}
    return Calibration(
        made="2026-01-01T00:00:00Z",
        machine=Machine.model_validate(description | {"ranks": 4} | machine),
        rates=Rates(fp32=5e10, bf16=2e10, attention=2e10, bandwidth=8e9, kernel_seconds=2e-6),
        points=(*points, last_point),
        steps=(
            Step(layers=2, hidden=256, heads=4, ffn=768, context=256, vocabulary=512, global_batch=16, micro_batch=2,
                 precision="fp32", strategy="ddp", seconds=1.0),
        ),
    )  # fmt: skip


def test_lines_are_those_that_the_points_lie_on_and_answer_for_other_sizes_and_groups() -> None:
    calibration = measured()
    for line in calibration.lines():
        assert line.alpha == pytest.approx(ALPHA)
        assert line.beta == pytest.approx(BETA)
    here = calibration.accelerator()
    assert all_reduce(10**6, Group(4, 4, here)) == pytest.approx(4 * ALPHA + 1.5e6 / BETA)
    assert all_gather(10**6, Group(3, 3, here)) == pytest.approx(2 * ALPHA + 2 / 3 * 1e6 / BETA)
    slow_network = here.model_copy(update={"network": 1e6})
    assert all_reduce(10**6, Group(8, 1, slow_network)) > 1  # no measurement between nodes: formulas apply


def test_a_fitted_latency_is_never_negative() -> None:
    """Points that grow faster than their bytes, as where large messages exceed a cache."""
    points = [
        Point(collective="all_reduce", ranks=2, size=size, seconds=seconds, fitted=True)
        for size, seconds in ((1_000_000, 1e-3), (4_000_000, 8e-3))
    ]
    (line,) = measured().model_copy(update={"points": tuple(points)}).lines()
    assert line.alpha == 0 and 1e-3 < 1_000_000 / line.beta < 2e-3


def test_a_prediction_is_judged_by_what_no_line_was_laid_through() -> None:
    assert measured().errors()["all_gather"] == pytest.approx(0.5)
    assert set(measured().errors()) == {"all_gather", "step"}


def test_a_device_of_the_table_keeps_what_was_not_measured() -> None:
    here = measured(device="NVIDIA H100 80GB HBM3", kind="nvidia").accelerator()
    assert (here.name, here.memory, here.network) == ("H100", 80e9, 50e9)
    assert here.reach == pytest.approx(2e10 / 989.4e12)
    assert here.lines


def test_a_calibration_that_is_torn_or_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration.write(measured(), path)
    assert calibration.read(path) == measured()
    whole = path.read_text()
    for text in (whole[:-40], whole.replace('"version": 1', '"version": 2'), whole.replace('"bf16"', '"bf17"'), "[]"):
        path.write_text(text)
        with pytest.raises(SpecError, match="holdfast calibrate"):
            calibration.read(path)
    with pytest.raises(MissingError, match="holdfast calibrate"):
        calibration.read(tmp_path / "nowhere.json")


@pytest.mark.drill
def test_real_ranks_are_measured_and_a_plan_is_made_with_it(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    result = CliRunner().invoke(
        app, ["calibrate", "--ranks", "2", "--out", str(path), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    collectives = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "point_to_point"}
    assert {line["collective"] for line in output["lines"]} == collectives
    assert set(output["errors"]) == collectives | {"step"}
    assert all(seconds > 0 for seconds in (*output["predicted"]["collectives"], *output["predicted"]["steps"]))
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "name: a\ndata: {sources: [{uri: x}]}\nmodel: {layers: 2, hidden: 128, heads: 2}\nparallel: {processes: 2}\n"
    )
    planned = CliRunner().invoke(app, ["plan", str(spec), "--calibration", str(path), "--json"], catch_exceptions=False)
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["today"]["step"]["seconds"] > 0
    twice = CliRunner().invoke(app, ["plan", str(spec), "--calibration", str(path), "-a", "H100"])
    assert twice.exit_code == 2
