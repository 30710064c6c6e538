"""What a person sees when a step fails, and how the run goes on when something died."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.whole.small import held, holdfast, objects, only, start, write_corpus, write_spec

PATIENCE = 300.0  # seconds
BEYOND_A_SAVE = 8  # steps
pytestmark = pytest.mark.timeout(1200)  # more than an undisturbed run and all that is waited for may take


def test_bad_data_fails_with_its_code_its_reason_and_a_summary(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus/bad.txt").write_bytes(b"not \xff\xfe text")
    write_spec(tmp_path)
    done = holdfast(tmp_path, "spec.yaml")
    assert done.returncode == 11, done.stdout + done.stderr
    assert "✗ preprocess" in done.stdout
    assert "bad.txt" in done.stdout
    assert "KFP" not in done.stdout
    assert "Traceback" not in done.stdout
    summary = only(tmp_path, "runs/*/summary.json")
    assert (summary["status"], summary["failed_step"]) == ("failed", "preprocess")
    assert "bad.txt" in summary["reason"]
    assert objects(tmp_path, "datasets/*/dataset.json") == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the final state of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    write_spec(folder, training={"steps": 40}, checkpoint={"every_steps": 5})
    done = holdfast(folder, "spec.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return str(only(folder, "runs/*/result.json")["state_digest"])


WORKER = "holdfast.pipelines.backends.local.worker"


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["holdfast"], marks=pytest.mark.drill),
        [WORKER],
        ["holdfast", WORKER],
        pytest.param(["holdfast.pipelines.backends.local.step"], marks=pytest.mark.drill),
    ],
    ids=" and ".join,
)
def test_whatever_is_killed_the_same_command_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: str, victims: list[str]
) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path, training={"steps": 40}, checkpoint={"every_steps": 5, "grace_seconds": 300})
    with start(tmp_path, "spec.yaml", **held(tmp_path, BEYOND_A_SAVE)) as process:
        _await_checkpoint(tmp_path, process)
        family = psutil.Process(process.pid).children(recursive=True)
        for victim in [_victim(process, name) for name in victims]:
            victim.kill()
        stdout, _ = process.communicate(timeout=PATIENCE)
        assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []  # whatever was left alone saves and leaves
    assert objects(tmp_path, "runs/*/result.json") == []
    if victims == [WORKER]:
        assert (process.returncode, "the process that runs the pipeline was killed" in stdout) == (204, True), stdout
    done = holdfast(tmp_path, "spec.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert only(tmp_path, "runs/*/result.json")["state_digest"] == undisturbed


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path, signum: signal.Signals) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path, training={"steps": 40}, checkpoint={"every_steps": 5, "grace_seconds": 300})
    with start(tmp_path, "spec.yaml", "--fresh", **held(tmp_path, BEYOND_A_SAVE)) as process:
        _await_checkpoint(tmp_path, process)
        os.kill(process.pid, signum)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 204, stdout + stderr
    assert "a checkpoint is saved" in stdout
    salt = only(tmp_path, "runs/*/run.json")["salt"]
    assert f"holdfast run spec.yaml --salt {salt}" in stdout
    assert only(tmp_path, "runs/*/summary.json")["status"] == "cancelled"
    assert objects(tmp_path, "runs/*/result.json") == []


def _await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not objects(folder, "runs/*/checkpoints/*.json"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _victim(process: subprocess.Popen[str], name: str) -> psutil.Process:
    root = psutil.Process(process.pid)
    if name == "holdfast":
        return root
    return next(
        child for child in root.children(recursive=True) if name in child.cmdline() and "python" in child.name()
    )
