"""The example scripts under faults: each ends with the state of its undisturbed run."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.spec import ExitCode
from tests.seeds import in_full

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTS = ("rank-killed", "command-killed", "rank-told-to-leave", "rank-frozen", "store-away")
SCRIPTS = ("accelerate", "lightning", "loop", "transformers", "trl")
STEPS = {"loop": 300, "accelerate": 200, "plugins": 300}  # of examples whose steps take milliseconds; else 60
SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "0"))  # another seed: other faults for each example, at other steps


def survives(example: str, faults: tuple[str, ...], folder: Path) -> None:
    """Run an example under `faults` by `holdfast chaos`, and compare its digest with that of an undisturbed run."""
    steps = STEPS.get(example, 60)
    if example == "plugins":
        spec, settings = EXAMPLES / "plugins/plugins.yaml", ["--steps", str(steps)]
    else:
        pytest.importorskip("torch" if example == "loop" else example)
        spec = EXAMPLES / f"scripts/{example}/spec.yaml"
        settings = ["--set", f'train.arguments=["{steps}"]', "--set", "checkpoint.every_steps=10"]
    settings += ["--seed", str(SEED), "--faults", ",".join(faults), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(EXAMPLES.parent)  # sources of the example of functions are relative to it
        result = CliRunner().invoke(app, ["chaos", str(spec), *settings])
    assert result.exit_code == ExitCode.OK, result.output
    (storm,) = json.loads(result.stdout)["storms"]
    assert storm["equal"]
    assert sorted(fault["fault"] for fault in storm["faults"]) == sorted(faults)


@pytest.mark.drill
@pytest.mark.timeout(2400)
@in_full
@pytest.mark.parametrize(
    ("example", "fault"),
    [(name, FAULTS[(number + SEED) % len(FAULTS)]) for number, name in enumerate((*SCRIPTS, "plugins"))],
)
def test_an_example_survives_a_fault_with_the_bits_of_an_undisturbed_run(
    example: str, fault: str, tmp_path: Path
) -> None:
    survives(example, (fault,), tmp_path)


@pytest.mark.drill
@pytest.mark.timeout(2400)
@in_full
@pytest.mark.parametrize("example", ["loop", "plugins"])
def test_an_example_survives_all_faults_in_one_run_with_the_bits_of_an_undisturbed_run(
    example: str, tmp_path: Path
) -> None:
    survives(example, FAULTS, tmp_path)


def test_a_script_has_its_own_number_of_steps_under_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["chaos", str(EXAMPLES / "scripts/loop/spec.yaml"), "--steps", "20"])
    assert result.exit_code == ExitCode.USAGE
    assert "has its own number of steps" in result.output
