"""Local copies under real training: the failures, the step that the next gang resumes from, and equal bits."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint.local_tiers.tier_writer import whole_steps
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store
from holdfast.store.file import FileStore
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AttemptBegan
from tests import warm
from tests.faults.killing import outcome
from tests.faults.nodes import HELD, Held, kill_family
from tests.faults.test_agent import run_node
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.ports import LAUNCH_KEY, free_port
from tests.train.ranks import launch, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec, train_once

BASE = (f"training.steps={STEPS}", "parallel.processes=2", "parallel.strategy=fsdp", "checkpoint.every_steps=10")
SPEC = tiny_spec(*BASE, "checkpoint.memory.every_steps=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The end of an undisturbed run without local tiers."""
    return undisturbed_end(tmp_path_factory, "fsdp")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of this node, for one test."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "memory"))
    return tmp_path / "memory"


def begun(store: Store) -> list[int]:
    """The steps from which the attempts of the run started."""
    events = read_events(store, run_id(SPEC, DATASET_ID))
    return [event.step for event in events if isinstance(event, AttemptBegan)]


def die_at(step: int, store: Store, home: Path) -> str:
    """Train until a rank is killed right after its copy of `step` is complete. Returns the output."""
    code, output = run_node(
        store, SPEC, launch(store, SPEC), home, "tests.faults.dying_worker", HOLDFAST_TEST_DIES=f"1:{step}"
    )
    assert code == ExitCode.KILLED, output
    return output


@pytest.mark.slow
def test_the_next_gang_resumes_from_the_memory_copy_and_not_the_older_checkpoint(
    tmp_path: Path, memory: Path, undisturbed: dict[str, object]
) -> None:
    store = new_store(tmp_path / "store")
    printed = die_at(17, store, tmp_path)
    assert checkpoint_steps(store, run_id(SPEC, DATASET_ID)) == [10], printed
    train_once(SPEC, store.url, tmp_path / "home")
    assert begun(store) == [0, 17], printed
    assert outcome(store, SPEC)[1] == undisturbed
    assert list(memory.iterdir()) == []  # the run is complete


NODES = (
    "training.steps=60", "parallel.strategy=fsdp", "checkpoint.every_steps=1000", "cluster.nodes.min=2",
    "cluster.nodes.max=2",
)  # fmt: skip
HELD_AT = 15  # steps


@contextmanager
def two_nodes(spec: Spec, store: Store, folder: Path, held: Held) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One launch on two nodes with separate memory. All its processes end with the block."""
    number = launch(store, spec)
    port = free_port()
    command = [
        sys.executable, "-m", "holdfast.launch.torchrun", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={number}", "--local-addr=127.0.0.1",
        "--max-restarts=0", "--monitor-interval=0.05", "-m", HELD,
        f"--run-id={run_id(spec, DATASET_ID)}", f"--launch={number}", f"--store={store.url}",
    ]  # fmt: skip
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(2):
            variables = {
                **os.environ, "HOLDFAST_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "HOLDFAST_MEMORY_DIR": str(folder / f"memory-{node}"), **held.variables, **LAUNCH_KEY,
            }  # fmt: skip
            with (folder / f"node-{node}.log").open("ab") as output:
                nodes.append(warm.popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        yield nodes
    finally:
        for process in nodes:
            kill_family(process)


def kept(folder: Path, writer: int, run: str) -> int:
    """The newest step of a writer in a memory."""
    steps = [step for root in folder.glob(f"*/w{writer:05d}") for _, step in whole_steps(FileStore(root), run, writer)]
    return max(steps, default=0)


@pytest.mark.drill
@pytest.mark.timeout(1000)  # longer than all its waits together
def test_a_node_killed_with_its_memory_loses_no_step_that_its_neighbour_holds(tmp_path: Path) -> None:
    calm, store = new_store(tmp_path / "calm"), new_store(tmp_path / "store")
    spec = tiny_spec(*NODES, "checkpoint.memory.every_steps=1", "checkpoint.memory.peers=1")
    run = run_id(spec, DATASET_ID)
    (tmp_path / "other").mkdir()
    gate = Held(store, run, tmp_path / "holds", lambda: True)
    gate.hold(spec.training.steps)
    with two_nodes(tiny_spec(*NODES), calm, tmp_path / "other", gate) as nodes:
        assert [node.wait(240) for node in nodes] == [0, 0], (tmp_path / "other" / "node-0.log").read_text()
    gate.hold(HELD_AT)
    memories = [tmp_path / "memory-0", tmp_path / "memory-1"]
    with two_nodes(spec, store, tmp_path, gate) as nodes:
        deadline = time.monotonic() + 180
        # Wait until all ranks are held: a copy that is two steps old would be useless, and here it may be.
        while min(kept(memory, writer, run) for memory in memories for writer in range(2)) < HELD_AT:
            assert time.monotonic() < deadline, (tmp_path / "node-0.log").read_text()
            time.sleep(0.01)
        kill_family(nodes[1])
        shutil.rmtree(memories[1])
        gate.hold(spec.training.steps)
        assert nodes[0].wait(240) != 0
    assert checkpoint_steps(store, run) == []
    with two_nodes(spec, store, tmp_path, gate) as nodes:
        assert [node.wait(240) for node in nodes] == [0, 0], (tmp_path / "node-0.log").read_text()
    start_steps = [event.step for event in read_events(store, run) if isinstance(event, AttemptBegan)]
    assert start_steps == [0, HELD_AT]
    assert trained(store, spec) == trained(calm, spec)
