"""A hanging rank is reported with its place, its stacks are saved, and the run resumes to the same bits."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.chaos.processes import TORCHRUN
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store, layout
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AttemptBegan, HangDetected, LaunchEnded
from tests import warm
from tests.faults.killing import outcome
from tests.faults.nodes import HELD, Held
from tests.faults.test_agent import run_node
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.ports import LAUNCH_KEY, free_port
from tests.train.ranks import launch
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec, train_once

COMMON = (f"training.steps={STEPS}", "parallel.processes=2", "checkpoint.every_steps=7")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The end of an undisturbed run."""
    return undisturbed_end(tmp_path_factory)


def hang_detected(store: Store, spec: Spec) -> HangDetected:
    """The only hang event of the run."""
    (event,) = [event for event in read_events(store, run_id(spec, DATASET_ID)) if isinstance(event, HangDetected)]
    return event


def log_of(store: Store, spec: Spec, rank: int) -> str:
    """The saved output of a rank."""
    folder = layout.rank_log(run_id(spec, DATASET_ID), rank)
    return "".join(store.get(info.key).decode() for info in store.list(folder) if info.key.endswith(".log"))


def held_ranks(root: int) -> list[psutil.Process]:
    """The ranks that a training has started."""
    ranks = []
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):
            command = process.cmdline()
            ranks += [process] if HELD in command and TORCHRUN not in command else []
    return ranks


@pytest.mark.slow
def test_a_stopped_rank_is_detected_and_the_run_restarts_to_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    spec, store = tiny_spec(*COMMON), new_store(tmp_path / "store")
    gate = Held(store, run_id(spec, DATASET_ID), tmp_path / "holds", lambda: process.poll() is None)
    process = start_training(
        spec, store.url, tmp_path / "home", environment=gate.variables, module="tests.faults.held_training"
    )
    try:
        gate.let(8)
        (victim,) = [rank for rank in held_ranks(process.pid) if rank.environ()["RANK"] == "1"]
        stop_time = time.time()
        victim.suspend()
        gate.hold(STEPS)
        output, _ = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == ExitCode.OK, output
    hang = hang_detected(store, spec)
    print(f"named {hang.time - stop_time:.2f} s after it was stopped")  # limit F3
    assert (hang.rank, hang.launch) == (1, 1)
    assert re.match(r"rank 1 hangs on .*: its process is stopped by a signal; 1 more wait$", hang.message)
    events = read_events(store, run_id(spec, DATASET_ID))
    launches = [event for event in events if isinstance(event, LaunchEnded)]
    assert [event.code for event in launches] == [ExitCode.HUNG, ExitCode.OK]
    assert hang.message[:60] in launches[0].detail
    assert sum(isinstance(event, AttemptBegan) for event in events) == 2
    assert "most recent call first" in log_of(store, spec, 0)
    assert "Rank 1 was in the phase" in log_of(store, spec, 1)
    assert outcome(store, spec)[1] == undisturbed


@pytest.mark.drill
def test_a_hang_is_reported_with_the_phase_and_ends_the_gang_with_201(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For other hangs of a rank, see tests/launch/node/test_hangs.py."""
    spec, store = tiny_spec(*COMMON, "parallel.strategy=fsdp"), new_store(tmp_path / "store")
    number, hangs = launch(store, spec), "1:12:collective"
    code, output = run_node(store, spec, number, tmp_path, "tests.faults.hanging_worker", HOLDFAST_TEST_HANGS=hangs)
    assert code == ExitCode.HUNG, output
    words = "in the phase data of step 13, since [^:]*: it waits for other ranks there; 1 more wait"
    assert re.match(f"rank 1 hangs on .*, {words}", hang_detected(store, spec).message)
    assert "barrier" in log_of(store, spec, 1)
    train_once(spec, store.url, tmp_path / "home")
    assert outcome(store, spec)[1] == undisturbed_end(tmp_path_factory, "fsdp")


@pytest.mark.drill
def test_a_stopped_node_is_detected_by_its_peers(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    spec, store, port = tiny_spec(*COMMON), new_store(tmp_path / "store"), free_port()
    number = launch(store, spec)
    nodes = [
        start_node(store, spec, number, tmp_path / "home", HOLDFAST_TEST_HANGS="1:12:node", PET_NNODES="2",
                   PET_NODE_RANK=str(node), PET_NPROC_PER_NODE="1", PET_MASTER_ADDR="127.0.0.1",
                   PET_MASTER_PORT=str(port))
        for node in range(2)
    ]  # fmt: skip
    try:
        output = nodes[0].communicate(timeout=300)[0]
        assert re.search(r"rank 1 hangs on .*: nothing is heard of.*; 1 more wait", output), output
        assert nodes[0].returncode == ExitCode.LOST_PEER, output
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):  # stopped processes too
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(300)
    assert "most recent call first" in log_of(store, spec, 0)
    train_once(spec, store.url, tmp_path / "home")
    assert outcome(store, spec)[1] == undisturbed


def start_node(store: Store, spec: Spec, number: int, home: Path, **variables: str) -> subprocess.Popen[str]:
    """Start one node of a launch, as Slurm and Ray do."""
    command = [sys.executable, "-m", "holdfast.launch.torchrun", "--max-restarts=0"]
    command += [
        "-m",
        "tests.faults.hanging_worker",
        f"--run-id={run_id(spec, DATASET_ID)}",
        f"--launch={number}",
        f"--store={store.url}",
    ]
    environment = {**os.environ, **LAUNCH_KEY, "HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    return warm.popen(
        command, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
