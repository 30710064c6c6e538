"""A whole training on the emulated cluster: two nodes, torchrun, gloo, through the command that production runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from components.checkpoint import list_attempts
from components.checkpoint.attempts import read_endings
from components.spec import ExitCode, Spec, run_id
from components.store import Store
from tests.cluster.emulation import Emulation
from tests.faults.killing import Output, outcome
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec, train_once

STEPS = 30
COMMON = (f"training.steps={STEPS}", "checkpoint.every_steps=5", "checkpoint.grace_seconds=10")


def comparable(store: Store, spec: Spec) -> dict[str, object]:
    """What must be the same bits, whatever the run is called."""
    _, found = outcome(store, spec)
    export = {Path(key).name: data for key, data in found["export"].items()}  # type: ignore[attr-defined]
    return {"tensors": found["tensors"], "history": found["history"], "export": export}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What two processes on one machine end with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    store, spec = new_store(folder / "store"), tiny_spec(*COMMON, "parallel.processes=2")
    train_once(spec, store.url, folder / "home")
    return comparable(store, spec)


class World:
    """An emulated cluster, a store on its volume, and a spec for two nodes."""

    def __init__(self, cluster: Emulation, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.store = new_store(folder / "store")
        volume = f'[{{claim: store, path: "{folder / "store"}"}}]'
        self.spec = tiny_spec(*COMMON, "cluster.nodes.min=2", "cluster.nodes.max=2", f"cluster.volumes={volume}")
        self.run_id = run_id(self.spec, DATASET_ID)
        self.launchers = 0

    def launch(self, pod: str = "") -> tuple[psutil.Popen, Output, threading.Thread]:
        """Start `python -m components.train`, as the pipeline's pod `pod` does."""
        environment = {
            "HOLDFAST_LAUNCHER": "kubernetes",
            "KUBECONFIG": str(self.cluster.kubeconfig(self.folder / "kubeconfig")),
            "HOLDFAST_POD_NAME": pod,
        }
        process = start_training(self.spec, self.store.url, self.folder / "home", environment=environment)
        output = Output()
        reader = threading.Thread(target=output.follow, args=(process.stdout,))
        reader.start()
        return process, output, reader

    def pod_process(self, rank: int) -> psutil.Process:
        """torchrun of a node's pod."""
        role = "master-0" if rank == 0 else "worker-0"
        pods = [pod for pod in self.cluster.objects.all("pods") if pod["metadata"]["name"].endswith(role)]
        return psutil.Process(self.cluster.kubelet.processes[pods[-1]["metadata"]["uid"]].pid)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Emulation(tmp_path / "cluster") as cluster:
        yield World(cluster, tmp_path)


@pytest.mark.slow
def test_a_pod_killed_in_training_costs_a_restart_of_the_gang_and_no_bit(world, undisturbed) -> None:
    process, output, reader = world.launch()
    output.wait_for_step(8)
    for child in world.pod_process(1).children(recursive=True):
        child.kill()
    code = process.wait(120)
    reader.join()
    assert code == 0, "".join(output.lines)
    assert comparable(world.store, world.spec) == undisturbed
    assert [number for number, _ in list_attempts(world.store, world.run_id)] == [1, 2]
    endings = read_endings(world.store, world.run_id)
    assert endings[1]["code"] in (ExitCode.KILLED, ExitCode.LOST_PEER) and endings[2]["code"] == 0
    assert "on node node-" in endings[1]["detail"]
    assert world.cluster.jobs() == [f"holdfast-{world.run_id}-2"]  # kept for a while, by its own time to live
    assert world.cluster.objects.all("leases") == []


@pytest.mark.slow
def test_a_launcher_that_is_killed_or_evicted_leaves_the_job_and_the_next_one_adopts_it(world, undisturbed) -> None:
    world.cluster.start_workflow()
    process, output, reader = world.launch("launcher-1")
    output.wait_for_step(3)
    os.kill(process.pid, signal.SIGTERM)  # a drained node; the workflow lives
    assert process.wait(60) == ExitCode.PREEMPTED, "".join(output.lines)
    reader.join()
    assert len(world.cluster.jobs()) == 1
    process, output, reader = world.launch("launcher-2")
    output.wait_for_step(10)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    reader.join()
    process, output, reader = world.launch("launcher-2")  # its container again, in the same pod
    assert process.wait(120) == 0, "".join(output.lines)
    reader.join()
    assert "adopting job" in "".join(output.lines)
    assert [number for number, _ in list_attempts(world.store, world.run_id)] == [1]
    assert comparable(world.store, world.spec) == undisturbed
