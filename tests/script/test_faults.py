"""The example scripts under faults: each ends with the state of its undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.spec import ExitCode
from tests.script.gated import EXAMPLES

FAULTS = ("rank-killed", "command-killed", "rank-told-to-leave", "rank-frozen", "store-away")
STEPS = {"loop": 300}  # of a script whose steps take milliseconds; else 100


@pytest.mark.drill
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXAMPLES.glob("*/spec.yaml")))
def test_an_example_survives_killed_and_frozen_processes_and_a_store_that_is_away_with_equal_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in {"trl": ["trl"], "lightning": ["lightning"], "accelerate": ["accelerate"]}.get(name, []):
        pytest.importorskip(package)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    steps = f'train.arguments=["{STEPS.get(name, 100)}"]'
    settings = ["--set", steps, "--set", "checkpoint.every_steps=10", "--seed", "1", "--faults", ",".join(FAULTS)]
    result = CliRunner().invoke(app, ["chaos", str(EXAMPLES / name / "spec.yaml"), *settings, "--json"])
    assert result.exit_code == ExitCode.OK, result.output
    (storm,) = json.loads(result.stdout)["storms"]
    assert storm["equal"]
    assert sorted(fault["fault"] for fault in storm["faults"]) == sorted(FAULTS)


def test_a_script_has_its_own_number_of_steps_under_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["chaos", str(EXAMPLES / "loop/spec.yaml"), "--steps", "20"])
    assert result.exit_code == ExitCode.USAGE
    assert "has its own number of steps" in result.output
