"""The benchmark of one accelerator, with tiny shapes on the CPU."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.accelerator import child
from benchmarks.accelerator.request import Request
from benchmarks.accelerator.runner import Bench
from tests import warm

pytestmark = pytest.mark.slow  # the fixture measures


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    """The JSON report of three short sections."""
    out = tmp_path_factory.mktemp("accelerator")
    command = [sys.executable, "-m", "benchmarks.accelerator", "--tiny", "--only=memory,mfu,locking", "--steps=1"]
    process = warm.run([*command, f"--out={out}"], {**os.environ, "OMP_NUM_THREADS": "1"}, Path.cwd())
    assert process.returncode == 0, process.stderr
    report = json.loads((out / "accelerator.json").read_text())
    assert json.loads(process.stdout) == report
    assert "| exact |" in (out / "accelerator.md").read_text()
    return dict(report)


def test_every_variant_of_mfu_is_measured(found: dict[str, dict[str, dict[str, object]]]) -> None:
    assert found["mfu"].keys() == {"off", "exact", "exact-documents", "bare"}
    assert all("error" not in part and part["steps"] == 1 for part in found["mfu"].values()), found["mfu"]


def test_the_plan_of_a_tiny_model_is_close_to_its_peak(found: dict[str, dict[str, dict[str, object]]]) -> None:
    for case in ("tiny none", "tiny full"):
        part = found["memory"]["all"][case]
        assert isinstance(part, dict)
        assert 0.9 < part["planned_over_peak"] < 1.1


def test_memory_is_touched_during_a_training_loop(
    found: dict[str, dict[str, dict[str, object]]],
) -> None:
    part = found["locking"]["all"]
    assert part["bytes"] == 2**26 and "lock_new" not in part, part
    assert isinstance(part["touch"], dict)
    assert part["touch"]["longest_step_s"] <= part["touch"]["seconds"]


def test_a_failed_measurement_is_recorded_and_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Request) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(child.MEASURES, "kernels", fail)
    monkeypatch.setattr(child, "MODULES", ())
    arguments = argparse.Namespace(out=tmp_path, tiny=True, steps=1, seconds=100.0)
    bench = Bench(arguments, tmp_path)
    bench.run("kernels")
    bench.measure("again", "machine", "machine")
    report = json.loads((tmp_path / "accelerator.json").read_text())
    assert "no such kernel" in report["kernels"]["all"]["output"]
    assert report["again"]["machine"]["exit"] == 0
