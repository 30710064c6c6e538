"""The exit of a step in its batch job that must shut down before its work began."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.spec.errors import ExitCode
from holdfast.steps.jobs import outcome_of
from holdfast.store import open_store
from tests import warm

# The step's process, in which the step's module is replaced.
STEP = """
import os, signal, sys, time
from holdfast.pipelines.backends.slurm import step
step.import_module = lambda name: {}
{}
sys.exit(step.main(sys.argv[1:]))
"""


def ended(
    folder: Path, meanwhile: str, *arguments: str, before: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A completed train step, without a Slurm."""
    command = [sys.executable, "-c", STEP.format(meanwhile, before), "train", "--key=a", "--first=6"]
    command += ["--spec=none.yaml", f"--store={(folder / 'store').as_uri()}", *arguments]
    return warm.run(command, {**os.environ, "PATH": str(folder), "SLURM_JOB_ID": "7", **variables}, folder)


@pytest.mark.parametrize(
    ("part", "task"),
    [
        ("", {}),
        ("2", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}),
        ("", {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}),  # inherited from the job that submitted it
    ],
)
def test_a_training_requeued_after_its_deadline_does_not_start(tmp_path: Path, part: str, task: dict[str, str]) -> None:
    (tmp_path / "trials.json").write_text('[["training.seed=1"], ["training.seed=2"]]')
    trials = ["--trials-file=trials.json"] if part else []
    (tmp_path / f"train-7{'_' * bool(part)}{part}.began").write_text(str(time.time() - 3600))
    lost = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    result = ended(tmp_path, "print('it began')", "--deadline=3600", *trials, before=lost, **task)
    assert result.returncode == ExitCode.CANCELLED, result.stderr
    assert "it began" not in result.stdout
    outcome = outcome_of(open_store((tmp_path / "store").as_uri()), "a-6", f"train-{part}" if part else "train")
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (
        ExitCode.CANCELLED, "took longer than cluster.deadline_hours (1) in all its allocations",
    )  # fmt: skip


def test_a_deadline_that_passes_before_the_step_takes_signals_is_one_all_the_same(tmp_path: Path) -> None:
    result = ended(tmp_path, "time.sleep(200)", "--deadline=0.5")
    assert result.returncode == ExitCode.CANCELLED, result.stderr
    assert "took longer than cluster.deadline_hours" in result.stderr
    assert (tmp_path / "train-7.began").exists()


def test_a_step_that_must_leave_before_it_takes_signals_tries_to_come_back(tmp_path: Path) -> None:
    result = ended(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    assert result.returncode == ExitCode.TERMINATED, result.stderr
    assert "train does not go back into the queue" in result.stderr
    assert (tmp_path / "train-7.tries").read_text() == "1"
