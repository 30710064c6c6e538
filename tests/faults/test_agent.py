"""The checkpoint agent under real training: a copy survives its rank, and training survives the agent."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store
from holdfast.telemetry import read_events
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import AttemptBegan, Progress
from tests import warm
from tests.faults.killing import (
    HELD_TRAINING,
    Deed,
    Output,
    followed,
    held_at,
    outcome,
    train_through,
    wait_for_victim,
)
from tests.faults.nodes import PATIENCE
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.train.ranks import launch
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, new_store, start_training, tiny_spec, train_once

OVERRIDES = (f"training.steps={STEPS}", "parallel.processes=2", "parallel.strategy=fsdp", "checkpoint.every_steps=1")
pytestmark = pytest.mark.timeout(1000)  # longer than train_through and an undisturbed run may take


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The end of an undisturbed run."""
    return undisturbed_end(tmp_path_factory, "fsdp")


def run_node(store: Store, spec: Spec, number: int, home: Path, module: str, **variables: str) -> tuple[int, str]:
    """Run one launch on one node as a launcher does. Returns its exit code and its output."""
    command = [
        sys.executable, "-m", "holdfast.launch.torchrun", "--nnodes=1", "--nproc-per-node=2",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0",
        "--monitor-interval=0.05", "-m", module, f"--run-id={run_id(spec, DATASET_ID)}", f"--launch={number}",
        f"--store={store.url}",
    ]  # fmt: skip
    environment = {**os.environ, "HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with warm.popen(
        command, {**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.slow
def test_the_agent_commits_the_copy_of_a_killed_rank_and_the_next_gang_resumes_from_it(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    spec, store = tiny_spec(*OVERRIDES), new_store(tmp_path / "store")
    code, output = run_node(
        store, spec, launch(store, spec), tmp_path, "tests.faults.dying_worker", HOLDFAST_TEST_DIES="0:7"
    )
    assert code == ExitCode.KILLED, output
    assert checkpoint_steps(store, run_id(spec, DATASET_ID))[-1] == 7, output
    train_once(spec, store.url, tmp_path / "home")
    attempts = [event for event in read_events(store, run_id(spec, DATASET_ID)) if isinstance(event, AttemptBegan)]
    assert [event.step for event in attempts] == [0, 7]
    assert outcome(store, spec)[1] == undisturbed


@pytest.mark.slow
def test_an_agent_killed_repeatedly_during_saves_does_not_interrupt_training(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    spec, store = tiny_spec(*OVERRIDES), new_store(tmp_path / "store")
    diary = train_through(spec, store, tmp_path / "home", [Deed("agent", step, 0.0) for step in (2, 9, 16)])
    assert outcome(store, spec)[1] == undisturbed, diary
    attempts = [event for event in read_events(store, run_id(spec, DATASET_ID)) if isinstance(event, AttemptBegan)]
    assert len(attempts) == 1, diary


@pytest.mark.slow
def test_an_agent_that_is_stopped_holds_training_up_and_no_bit_changes(
    tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    spec, store = tiny_spec(*OVERRIDES), new_store(tmp_path / "store")
    gate = held_at(5, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        output.wait_for_step(3)
        agent = wait_for_victim(psutil.Process(process.pid), "agent")
        agent.suspend()
        gate.hold(STEPS)
        assert _step_it_stays_at(output) < STEPS
        with suppress(psutil.NoSuchProcess):  # its supervisor has replaced it
            agent.resume()
        assert process.wait(PATIENCE) == 0, "".join(output.lines)
        reader.join()
    assert outcome(store, spec)[1] == undisturbed
    assert psutil.wait_procs([agent], timeout=PATIENCE)[1] == []  # soon: it ends with its node


def _step_it_stays_at(output: Output) -> int:
    """The step at which a training stays for a second."""
    since, step = time.monotonic(), output.step
    while time.monotonic() - since < 1:
        for event in output.events.new():
            if isinstance(event, Progress):
                since, step = time.monotonic(), event.step
        time.sleep(0.02)
    return step
