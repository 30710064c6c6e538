"""A whole training on the emulated cluster: two nodes, torchrun, gloo, through the command that production runs."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import list_attempts
from holdfast.components.train import step
from holdfast.engines.assignment import Assignment
from holdfast.launch.kubernetes import KubernetesLauncher
from holdfast.launch.launches import read_exits
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store
from holdfast.telemetry.event_log import StoreEvents
from tests.cluster.api import Object, StatusError
from tests.cluster.emulation import Emulation
from tests.faults.killing import HELD_TRAINING, Output, held_at, outcome
from tests.faults.nodes import PATIENCE
from tests.launch.kubernetes.conftest import SERVE, python
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, start_training, tiny_spec, train_once

STEPS = 30
COMMON = (f"training.steps={STEPS}", "checkpoint.every_steps=5", "checkpoint.grace_seconds=10")


def comparable(store: Store, spec: Spec) -> dict[str, object]:
    """The part of the result that must be the same to the bit, for a run of any name."""
    _, state = outcome(store, spec)
    export = {Path(key).name: data for key, data in state["export"].items()}  # type: ignore[attr-defined]
    return {"tensors": state["tensors"], "history": state["history"], "export": export}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of two processes on one machine."""
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
        self.held = held_at(STEPS, self.spec, self.store, folder / "home")

    def launch(self, pod: str = "") -> tuple[subprocess.Popen[str], Output, threading.Thread]:
        """Start the train step in the pipeline's pod `pod`; its ranks compute as far as `held` permits."""
        environment = {
            "HOLDFAST_LAUNCHER": "kubernetes",
            "KUBECONFIG": str(self.cluster.kubeconfig(self.folder / "kubeconfig")),
            "HOLDFAST_POD_NAME": pod,
            **self.held.variables,
        }
        process = start_training(
            self.spec, self.store.url, self.folder / "home", environment=environment, module=HELD_TRAINING
        )
        output = Output(StoreEvents(self.store, self.run_id))
        reader = threading.Thread(target=output.follow, args=(process.stdout,), daemon=True)
        reader.start()
        return process, output, reader


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Emulation(tmp_path / "cluster") as cluster:
        yield World(cluster, tmp_path)


@pytest.mark.slow
def test_a_launcher_killed_at_any_stage_or_evicted_is_replaced_by_one_that_adopts_its_job(
    world: World, undisturbed: dict[str, object]
) -> None:
    cluster = world.cluster
    cluster.start_workflow()

    def launch_and_kill(when: Callable[[subprocess.Popen[str], Output], object], number: int) -> str:
        process, output, reader = world.launch("launcher-1")  # always the same pod's container
        when(process, output)
        process.send_signal(number)
        code = process.wait(PATIENCE)
        reader.join()
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else ExitCode.PREEMPTED), "".join(output.lines)
        return "".join(output.lines)

    def until(check: Callable[[], object]) -> Callable[..., object]:
        def wait(*_: object) -> None:
            with cluster.objects.changed:
                assert cluster.objects.changed.wait_for(check, PATIENCE)

        return wait

    def unanswered(
        verb: str, plural: str, then: Callable[..., object] = lambda *_: None
    ) -> Callable[[subprocess.Popen[str], Output], None]:
        """The launcher sends that request, gets no answer while it lives, and so cannot continue; `then` becomes
        true."""

        def wait(process: subprocess.Popen[str], output: Output) -> None:
            requested = threading.Event()

            def hold(*request: str) -> StatusError | None:
                if request == (verb, plural) and process.poll() is None:
                    requested.set()
                    process.wait(PATIENCE)
                    return StatusError(500, "no listener")
                return None

            cluster.server.faults.append(hold)
            assert requested.wait(PATIENCE)
            then(process, output)

        return wait

    def succeeded() -> bool:
        jobs = cluster.objects.all("pytorchjobs")
        return any(
            entry["type"] == "Succeeded" for job in jobs for entry in job.get("status", {}).get("conditions", [])
        )

    def to_the_end(*_: object) -> None:
        world.held.hold(STEPS)
        until(succeeded)()

    world.held.hold(15)
    launch_and_kill(unanswered("create", "pytorchjobs"), signal.SIGKILL)
    assert cluster.jobs() == []
    launch_and_kill(until(cluster.jobs), signal.SIGKILL)
    printed = launch_and_kill(unanswered("list", "pods", lambda _, output: output.wait_for_step(3)), signal.SIGTERM)
    assert "the next launcher adopts it" in printed
    launch_and_kill(lambda _, output: output.wait_for_step(12), signal.SIGKILL)
    launch_and_kill(unanswered("list", "pods", to_the_end), signal.SIGKILL)
    cluster.objects.delete("pods", "launcher-1")  # so no launcher waits for its lease to expire
    process, output, reader = world.launch("launcher-2")
    assert process.wait(PATIENCE) == 0, "".join(output.lines)
    reader.join()
    assert f"adopting job holdfast-{world.run_id}-2" in "".join(output.lines)
    assert cluster.jobs() == [f"holdfast-{world.run_id}-2"]
    assert [number for number, _ in list_attempts(world.store, world.run_id)] == [1]  # one gang, adopted each time
    assert comparable(world.store, world.spec) == undisturbed


def test_a_node_that_spoiled_two_launches_is_avoided_by_the_third(world: World) -> None:
    def program(pod: Object) -> list[str]:
        if pod["spec"]["nodeName"] == "node-b":
            return python("import os; os.kill(os.getpid(), 11)")
        return python("print('done')" if pod["metadata"]["labels"]["holdfast/launch"] == "3" else SERVE)

    world.cluster.kubelet.program = program
    launcher = KubernetesLauncher(world.spec.cluster, world.cluster.api())
    step.run_gang(
        world.spec, Assignment.of(world.spec, world.run_id, DATASET_ID), world.store, launcher, vocabulary=VOCABULARY
    )
    endings = read_exits(world.store, world.run_id)
    assert {number: ending.code for number, ending in endings.items()} == {1: 139, 2: 139, 3: 0}
    assert endings[2].blamed_nodes == ("node-b",)
    assert "exit code 139, signal 11" in endings[1].detail
    last = world.cluster.objects.all("pods")
    assert {pod["spec"]["nodeName"] for pod in last} <= {"node-a", "node-c"}
