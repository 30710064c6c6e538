"""What a person sees when a step fails, and how the run goes on when something died."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.whole.small import held, hold, holdfast, objects, only, start, write_corpus, write_spec

PATIENCE = 300.0  # seconds
BEYOND_A_SAVE = 3  # steps, at which training waits
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
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    write_spec(folder, training={"steps": 40}, checkpoint={"every_steps": 5, "grace_seconds": 300})
    done = holdfast(folder, "spec.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


WORKER = "holdfast.pipelines.backends.local.worker"
STEP = "holdfast.pipelines.backends.local.step"


class Disturbed:
    """Another run of the same spec, in the same store, whose training waits for what is done to it."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder, self._site = folder, site
        self._known = {path.parent for path in objects(folder, "runs/*/run.json")}
        self._held = held(site, 0)

    @property
    def run(self) -> Path | None:
        """Its folder in the store, once there is one."""
        found = {path.parent for path in objects(self.folder, "runs/*/run.json")} - self._known
        return found.pop() if found else None

    def disturb(
        self, saved: int, strike: Callable[[subprocess.Popen[str]], object], *arguments: str
    ) -> tuple[int, str]:
        """The command, struck once that step is saved; its code, and what it printed. All that it started ends."""
        hold(self._site, saved + BEYOND_A_SAVE)
        with start(self.folder, "spec.yaml", *arguments, **self._held) as process:
            deadline = time.monotonic() + PATIENCE
            while self._saved() < saved:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            family = psutil.Process(process.pid).children(recursive=True)
            strike(process)
            stdout, stderr = process.communicate(timeout=PATIENCE)
            assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []  # whatever was left alone saves and leaves
        assert self.run is not None and not (self.run / "result.json").exists()
        return process.returncode, stdout + stderr

    def _saved(self) -> int:
        """The newest checkpoint's step."""
        run = self.run
        steps = [] if run is None else [int(path.stem.rpartition("-")[2]) for path in run.glob("checkpoints/*.json")]
        return max(steps, default=0)

    def require_same_bits(self, *arguments: str) -> None:
        """The command given again, undisturbed, ends with the bits of the other run."""
        done = holdfast(self.folder, "spec.yaml", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.run is not None
        runs = [json.loads((each / "result.json").read_text()) for each in (self.run, *self._known)]
        assert len({result["run_id"] for result in runs}) == len(runs)
        for what in ("dataset_id", "state_digest"):
            assert len({result[what] for result in runs}) == 1


def kill(*victims: str) -> Callable[[subprocess.Popen[str]], None]:
    """What kills these processes of a command."""

    def strike(process: subprocess.Popen[str]) -> None:
        for victim in [_victim(process, name) for name in victims]:
            victim.kill()

    return strike


def test_a_signal_saves_and_says_how_to_go_on_and_what_is_killed_then_costs_no_bit(
    tmp_path: Path, undisturbed: Path
) -> None:
    run = Disturbed(undisturbed, tmp_path)
    code, printed = run.disturb(5, lambda process: process.send_signal(signal.SIGINT), "--fresh")
    assert code == 204, printed
    assert "a checkpoint is saved" in printed
    assert run.run is not None
    assert json.loads((run.run / "summary.json").read_text())["status"] == "cancelled"
    salt = json.loads((run.run / "run.json").read_text())["salt"]
    assert f"holdfast run spec.yaml --salt {salt}" in printed
    run.disturb(15, kill("holdfast", WORKER), "--salt", salt)
    run.require_same_bits("--salt", salt)


@pytest.mark.drill
def test_whatever_is_killed_the_same_command_ends_with_the_same_bits(tmp_path: Path, undisturbed: Path) -> None:
    run, salted = Disturbed(undisturbed, tmp_path), ("--salt", "killed")
    code, printed = run.disturb(5, kill(WORKER), *salted)
    assert (code, "the process that runs the pipeline was killed" in printed) == (204, True), printed
    run.disturb(15, kill("holdfast"), *salted)
    run.disturb(20, kill(STEP), *salted)
    code, printed = run.disturb(30, lambda process: process.send_signal(signal.SIGTERM), *salted)
    assert code == 204, printed
    run.require_same_bits(*salted)


def _victim(process: subprocess.Popen[str], name: str) -> psutil.Process:
    root = psutil.Process(process.pid)
    if name == "holdfast":
        return root
    return next(
        child for child in root.children(recursive=True) if name in child.cmdline() and "python" in child.name()
    )
