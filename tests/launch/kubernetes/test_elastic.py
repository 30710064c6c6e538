"""An elastic job on the emulated cluster, whose nodes take one pod each: a node is lost, and returns."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.engines.assignment import Assignment
from holdfast.launch.kubernetes import KubernetesLauncher
from holdfast.launch.launches import read_exits
from holdfast.spec import ExitCode, run_id
from holdfast.telemetry.event_log import StoreEvents
from tests.cluster.emulation import Emulation
from tests.cluster.objects import Object
from tests.faults.history import require_sound_history
from tests.faults.killing import Output
from tests.faults.nodes import HELD, PLAIN, Held
from tests.launch.kubernetes.conftest import SERVE, Running, job, python, rank_of, settings
from tests.train.ranks import train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec

STEPS = 40
DONE = "pass"
COMMON = ("training.determinism=elastic", f"training.steps={STEPS}", "checkpoint.every_steps=5")


@pytest.mark.drill
@pytest.mark.parametrize(("node", "launches"), [(1, 1), (0, 2)], ids=["another", "the first"])
def test_the_remaining_nodes_continue_and_readmit_a_lost_node(node: int, launches: int, tmp_path: Path) -> None:
    """When the first node, which hosts the rendezvous, is lost, the launcher starts the rest again."""
    store = new_store(tmp_path / "store")
    volume = f'[{{claim: store, path: "{tmp_path / "store"}"}}]'
    spec = tiny_spec(
        *COMMON, "cluster.nodes={min: 2, max: 3, rendezvous_seconds: 60}", f"cluster.volumes={volume}",
        "checkpoint.grace_seconds=10",
    )  # fmt: skip
    identity = run_id(spec, DATASET_ID)
    with Emulation(tmp_path / "cluster") as cluster:
        environment = {
            "HOLDFAST_LAUNCHER": "kubernetes",
            "KUBECONFIG": str(cluster.kubeconfig(tmp_path / "kubeconfig")),
        }
        process = start_training(spec, store.url, tmp_path / "home", environment=environment)
        held = Held(store, identity, tmp_path / "holds", lambda: process.poll() is None)
        cluster.kubelet.room, cluster.kubelet.program = 1, held_by(held)
        output = Output(StoreEvents(store, identity))
        reader = threading.Thread(target=output.follow, args=(process.stdout,), daemon=True)
        reader.start()
        held.wait_for_world(3)
        held.let(12)
        pods = {pod["metadata"]["name"]: pod for pod in cluster.objects.all("pods")}
        node_name = pods[f"holdfast-{identity}-1-worker-{node}"]["spec"]["nodeName"]
        cluster.kubelet.lose(node_name)
        held.hold(22)
        held.wait_for_world(2)
        held.let(22)
        waiting = [pod["metadata"]["name"] for pod in cluster.objects.all("pods") if not pod["spec"].get("nodeName")]
        cluster.kubelet.bring_back(node_name)
        held.wait_for_world(3)
        held.hold(STEPS)
        code = process.wait(180)
        reader.join()
    assert code == 0, "".join(output.lines)
    assert len(waiting) == 1, "the job had a place for all its pods"
    assert held.worlds() == [3, 2, 3]
    assert held.began()[-1].step >= 22, "growth lost a step"
    endings = read_exits(store, identity).values()
    assert [ending.code == 0 for ending in endings] == [False, True][-launches:], (endings, "".join(output.lines))
    require_sound_history(store, Assignment.of(spec, identity, DATASET_ID))
    assert train_in_ranks(1, store.url, tmp_path / "calm", [(COMMON, "calm", None)]) == [""]
    assert trained(store, spec) == trained(store, tiny_spec(*COMMON), "calm")


KILLED = "import os; os.kill(os.getpid(), 9)"
RECLAIMED = """
from holdfast.launch.exits import node_exit_of, write_exit_report
write_exit_report(node_exit_of((), [204], reclaimed="the cloud takes it back"))
raise SystemExit(204)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "lives", "code", "pods"),
    [(1, [KILLED, DONE], ExitCode.OK, 2), (1, [KILLED], ExitCode.KILLED, 3), (0, [KILLED], ExitCode.KILLED, 1),
     (1, ["raise SystemExit(11)"], ExitCode.BAD_DATA, 1), (1, [*[RECLAIMED] * 4, DONE], ExitCode.OK, 5)],
    ids=["once", "again and again", "the first", "what will not pass", "reclaimed again and again"],
)  # fmt: skip
def test_a_pod_of_an_elastic_job_may_be_lost_but_not_the_first_nor_again_and_again(
    cluster: Emulation, rank: int, lives: list[str], code: int, pods: int
) -> None:
    pod_names: list[str] = []

    def program(pod: Object) -> list[str]:
        if rank_of(pod) != rank:
            return python(SERVE)
        pod_names.append(pod["metadata"]["name"])
        return python(lives[min(len(pod_names), len(lives)) - 1])

    cluster.kubelet.program = program
    elastic: dict[str, Any] = {"nodes": {"min": 1, "max": 2}, "restarts": {"budget": 2}}
    ending = Running(KubernetesLauncher(settings(**elastic), cluster.api()), job(**elastic)).end()
    assert ending.code == code
    assert ending.detail.startswith(f"node rank {rank} " if code else "")
    assert len(pod_names) >= pods  # the operator keeps creating pods until the job is gone


def test_a_pod_of_a_job_with_spares_may_be_lost_and_is_made_again(cluster: Emulation) -> None:
    pod_names: list[str] = []

    def program(pod: Object) -> list[str]:
        if rank_of(pod) != 1:
            return python(SERVE)
        pod_names.append(pod["metadata"]["name"])
        return python(KILLED if len(pod_names) == 1 else DONE)

    cluster.kubelet.program = program
    spared: dict[str, Any] = {"nodes": {"min": 2, "max": 2}, "spares": 1, "restarts": {"budget": 2}}
    ending = Running(KubernetesLauncher(settings(**spared), cluster.api()), job(**spared)).end()
    assert ending.code == ExitCode.OK, ending
    assert len(pod_names) == 2


def held_by(held: Held) -> Callable[[Object], None]:
    """A pod's program: its normal command, with ranks that wait for the test."""

    def program(pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        container["command"] = [HELD if argument == PLAIN else argument for argument in container["command"]]
        container["env"] += [{"name": name, "value": value} for name, value in held.variables.items()]

    return program
