"""The examples of frameworks resume with the bits of an undisturbed run, in mid-epoch and at the end of an epoch.

The script of each example runs in this process, as `holdfast verify` runs it in launches.
"""

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.code.resolve import publish_code
from holdfast.components.train.script import train_script
from holdfast.launch.launches import read_exits
from holdfast.pipelines.paths import load_spec
from holdfast.spec import ExitCode
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.checkpoint.saving import opened
from tests.script.launched import digest_of_run, run_script
from tests.seeds import FEW, in_full

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"
STEPS = 7
Ended = tuple[int, str, list[int], list[object]]  # step, digest, and the steps and losses of the history
# Framework, example, its arguments, and the last step of its first epoch.
CASES = [
    pytest.param("accelerate", "accelerate", [], 5, id="accelerate", marks=pytest.mark.slow),
    pytest.param("lightning", "lightning", [], 5, id="lightning", marks=pytest.mark.drill),
    pytest.param("trl", "trl", [], 5, id="sft", marks=pytest.mark.drill),
    pytest.param("trl", "trl", ["dpo"], 5, id="dpo", marks=pytest.mark.drill),
]
# Appended to a module of an example: a stop request after step 3, and later SIGKILL after step 7.
TROUBLE = """
import os, signal
from pathlib import Path
from holdfast.script.session import ManagedSession

_step = ManagedSession.step

def step(self, number, /, **metrics):
    _step(self, number, **metrics)
    for at, name, sent in ((3, "term", signal.SIGTERM), (7, "kill", signal.SIGKILL)):
        path = Path(os.environ["TROUBLE"]) / name
        if number == at and self.rank == self.world_size - 1 and path.exists():
            path.unlink()
            os.kill(os.getpid(), sent)

ManagedSession.step = step
"""


@pytest.mark.parametrize(("framework", "example", "arguments", "epoch"), CASES)
def test_an_example_that_stops_and_resumes_has_the_bits_of_an_undisturbed_run(
    framework: str, example: str, arguments: list[str], epoch: int, tmp_path: Path
) -> None:
    pytest.importorskip(framework, reason=f"needs {framework}: pip install 'holdfast[scripts]'")
    [(calm, resumed)] = in_ranks(1, _runs, f"file://{tmp_path / 'store'}", example, arguments, epoch)
    assert calm[0] == STEPS
    assert calm[2] == [*range(1, STEPS + 1)]
    assert resumed == [calm, calm]


def _runs(rank: int, size: int, url: str, example: str, arguments: list[str], epoch: int) -> tuple[Ended, list[Ended]]:
    folder = EXAMPLES / example
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", str(STEPS), *arguments]

    def script() -> None:
        runpy.run_path(str(folder / "train.py"), run_name="__main__")

    def ended(run: str) -> Ended:
        rows = read_history(opened(url), run)
        return *digest_of_run(url, run), [row["step"] for row in rows], [row["loss"] for row in rows]

    assert run_script(url, "calm", script)
    resumed = []
    for stop in (epoch, epoch + 1):
        run_script(url, f"stopped-{stop}", script, stop_at=stop)
        assert digest_of_run(url, f"stopped-{stop}")[0] == stop
        assert run_script(url, f"stopped-{stop}", script)
        resumed.append(ended(f"stopped-{stop}"))
    return ended("calm"), resumed


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2] if FEW else [1, 2])
@pytest.mark.parametrize(
    "example", ["transformers", *(pytest.param(name, marks=in_full) for name in ("accelerate", "lightning", "trl"))]
)
def test_a_run_of_an_example_that_is_stopped_and_killed_ends_with_the_bits_of_a_calm_one(
    example: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(example, reason=f"needs {example}: pip install 'holdfast[scripts]'")
    monkeypatch.setenv("TROUBLE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "code"
    shutil.copytree(EXAMPLES / example, folder)
    with (folder / "mine.py").open("a") as file:
        file.write(TROUBLE)
    store = opened(f"file://{tmp_path / 'store'}")
    spec = load_spec(
        folder / "spec.yaml", ["train.arguments=['12']", "train.verify_steps=0", f"parallel.processes={processes}"]
    )
    publish_code(spec, store)
    calm = train_script(spec, "", store, salt="calm")
    for name in ("term", "kill"):
        (tmp_path / name).touch()
    result = train_script(spec, "", store)
    codes = [ending.code for _, ending in sorted(read_exits(store, result.run_id).items())]
    assert codes == [ExitCode.PREEMPTED, ExitCode.KILLED, ExitCode.OK]
    assert (result.step, result.state_digest) == (12, calm.state_digest)
    assert result.export_digest == calm.export_digest
