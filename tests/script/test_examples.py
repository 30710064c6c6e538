"""The examples of frameworks resume with the bits of an undisturbed run, in mid-epoch and at the end of an epoch.

The script of each example runs in this process, as `holdfast verify` runs it in launches.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.checkpoint.saving import opened
from tests.script.launched import digest_of_run, run_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"
STEPS = 7
# Framework, example, its arguments, and the last step of its first epoch.
CASES = [
    ("lightning", "lightning", [], 5),
]


@pytest.mark.slow  # a framework is imported
@pytest.mark.parametrize(("framework", "example", "arguments", "epoch"), CASES)
def test_an_example_that_stops_and_resumes_has_the_bits_of_an_undisturbed_run(
    framework: str, example: str, arguments: list[str], epoch: int, tmp_path: Path
) -> None:
    pytest.importorskip(framework, reason=f"needs {framework}: pip install 'holdfast[scripts]'")
    [(calm, resumed)] = in_ranks(1, _runs, f"file://{tmp_path / 'store'}", example, arguments, epoch)
    assert calm[0] == STEPS
    assert calm[2] == [*range(1, STEPS + 1)]
    assert resumed == [calm, calm]


def _runs(rank: int, size: int, url: str, example: str, arguments: list[str], epoch: int) -> tuple[object, list[object]]:
    folder = EXAMPLES / example
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", str(STEPS), *arguments]

    def script() -> None:
        runpy.run_path(str(folder / "train.py"), run_name="__main__")

    def ended(run: str) -> tuple[int, str, list[int], list[object]]:
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
