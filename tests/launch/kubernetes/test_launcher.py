"""The launcher on an emulated cluster: how jobs end, who creates them, and what remains of them."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.emitters import objects_for
from holdfast.launch.kubernetes import KubernetesLauncher, follow
from holdfast.launch.kubernetes.api_errors import ConflictError
from holdfast.spec import ExitCode
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, PreemptedError, SpecError
from tests.cluster.api import PLURALS, Object, StatusError
from tests.cluster.emulation import Emulation
from tests.faults.nodes import PATIENCE
from tests.launch.kubernetes.conftest import (
    RUN,
    SERVE,
    Running,
    both_ready,
    each,
    in_vain,
    job,
    python,
    rank_of,
    settings,
)

# Like a rank that has lost its peer: it leaves when its node knows how the peer ended, however busy the machine is.
LATER = """
import os, pathlib, time
peer = pathlib.Path('PEER')
while not peer.exists() or os.path.exists('/proc/' + peer.read_text()):
    time.sleep(0.05)
raise SystemExit(202)
"""
FELLED = "import os, pathlib; pathlib.Path('PEER.new').write_text(str(os.getpid())); os.rename('PEER.new', 'PEER'); "
# Neither leaves, or gets a signal, before both are ready.
MEET = """
import pathlib, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f'FOLDER/{os.getpid()}.met').touch()
while len(list(pathlib.Path('FOLDER').glob('*.met'))) < 2:
    time.sleep(0.05)
"""
QUIET, DONE = "import time; time.sleep(600)", "pass"
FIRST = f"holdfast-{RUN}-1"


def launcher(cluster: Emulation, pod: str | None = None) -> KubernetesLauncher:
    return KubernetesLauncher(settings(), cluster.api(), pod)


def left(cluster: Emulation) -> set[str]:
    """The names of all objects except a pipeline and its pods."""
    names = {manifest["metadata"]["name"] for plural in PLURALS for manifest in cluster.objects.all(plural)}
    return names - {"pipeline", "launcher-1", "launcher-2"}


def test_a_successful_launch_returns_the_log_tail_of_rank_0_and_keeps_the_job(cluster: Emulation) -> None:
    cluster.kubelet.program = each("[print('line', n) for n in range(500)]", DONE)
    running = Running(launcher(cluster), job())
    ending = running.end()
    assert ending.code == 0
    assert ending.log_tail == tuple(f"line {n}" for n in range(460, 500))
    assert cluster.jobs() == [FIRST]


def test_a_job_without_retention_is_deleted(cluster: Emulation) -> None:
    cluster.kubelet.program = each("print('done')", DONE)
    assert Running(launcher(cluster), job(ttl_minutes=0)).end().code == 0
    with cluster.objects.changed:
        assert cluster.objects.changed.wait_for(lambda: not left(cluster), PATIENCE), left(cluster)


@pytest.mark.parametrize(
    ("codes", "code", "rank"),
    [
        (("raise SystemExit(12)", QUIET), 12, 0),
        ((QUIET, "raise SystemExit(11)"), 11, 1),
        ((LATER, f"{FELLED}os.kill(os.getpid(), 9)"), 137, 1),
        ((LATER, f"{FELLED}raise SystemExit(203)"), 203, 1),
        (("raise SystemExit(204)", SERVE), 204, 0),
    ],
    ids=["diverged", "bad data", "killed", "store", "preempted"],
)
def test_a_failure_names_the_rank_that_was_the_cause_and_leaves_nothing(
    cluster: Emulation, tmp_path: Path, codes: tuple[str, str], code: int, rank: int
) -> None:
    programs = (f"print('the end of the log', flush=True)\n{text}" for text in codes)
    cluster.kubelet.program = each(*(text.replace("PEER", str(tmp_path / "peer")) for text in programs))
    ending = Running(launcher(cluster), job()).end()
    assert ending.code == code
    pod = cluster.kubelet.nodes[rank]
    assert ending.detail.startswith(f"node rank {rank} (pod {FIRST}-worker-{rank} on node {pod}): ")
    assert ending.log_tail[-1] == ("" if rank == 0 else f"[node rank {rank}] ") + "the end of the log"
    assert left(cluster) == set()


def status(phase: str = "Failed", **more: object) -> Object:
    return {"phase": phase, **more}


def container(**state: object) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "pytorch", "state": state}]}


@pytest.mark.parametrize(
    ("found", "code", "words", "blamed"),
    [
        (status(reason="Evicted", message="low on disk"), 137, "low on disk", {"node-b"}),
        (status("Unknown"), 137, "does not answer", {"node-b"}),
        (
            status(**container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
            137, "cluster.resources.memory", set(),
        ),
        (
            status("Pending", **container(waiting={"reason": "InvalidImageName"})),
            ExitCode.NOT_FOUND, "check cluster.image", set(),
        ),
    ],
    ids=["evicted", "node lost", "out of memory", "image"],
)  # fmt: skip
def test_a_pod_failure_of_the_cluster_is_reported_and_blames_the_node_where_due(
    cluster: Emulation, found: Object, code: int, words: str, blamed: set[str]
) -> None:
    cluster.kubelet.program = lambda pod: found if rank_of(pod) else python(SERVE)
    ending = Running(launcher(cluster), job()).end()
    assert ending.code == code
    assert words in ending.detail
    assert ending.blamed_nodes == blamed
    assert left(cluster) == set()


@pytest.mark.parametrize(("first", "blamed"), [(208, {"node-a", "node-b"}), (202, {"node-b"})], ids=["both", "one"])
def test_each_node_that_may_compute_wrong_is_blamed(
    cluster: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, blamed: set[str]
) -> None:
    monkeypatch.setattr(follow, "SETTLE_SECONDS", PATIENCE)
    cluster.kubelet.program = each(
        *(f"{MEET.replace('FOLDER', str(tmp_path))}raise SystemExit({code})" for code in (first, 208))
    )
    ending = Running(launcher(cluster), job()).end()
    assert ending.code == ExitCode.WRONG_ARITHMETIC
    assert ending.blamed_nodes == blamed
    assert left(cluster) == set()


def test_an_unschedulable_job_times_out_with_the_message_of_the_scheduler(
    cluster: Emulation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vain(monkeypatch, lambda: "Insufficient cpu" in caplog.text)
    cluster.kubelet.full = True
    ending = Running(launcher(cluster), job()).end()
    assert ending.code == ExitCode.UNSCHEDULABLE and ending.retryable
    assert "Insufficient cpu" in ending.detail
    assert left(cluster) == set()


def test_a_job_past_its_deadline_ends_permanently(cluster: Emulation) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    ending = Running(launcher(cluster), job(deadline_hours=0.0003)).end()
    assert ending.code == ExitCode.CANCELLED
    assert "cluster.deadline_hours" in ending.detail


@pytest.mark.parametrize("what", ["job", "pod"])
def test_an_externally_deleted_job_or_pod_is_a_retryable_failure(cluster: Emulation, what: str) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    running = Running(launcher(cluster), job())
    running.wait_for("ready")
    both_ready(cluster)
    if what == "job":
        cluster.objects.delete("pytorchjobs", FIRST, foreground=True)
    else:
        cluster.objects.delete("pods", f"{FIRST}-worker-1")
    ending = running.end()
    assert ending.retryable and ending.code != 0
    assert ("deleted" if what == "job" else "worker-1") in ending.detail
    assert left(cluster) == set()


def test_excluded_nodes_are_not_used_again(cluster: Emulation) -> None:
    cluster.kubelet.program = each("print('done')", DONE)
    avoiding = replace(job(), excluded_nodes=frozenset({"node-a"}))
    assert Running(launcher(cluster), avoiding).end().code == 0
    assert {pod["spec"]["nodeName"] for pod in cluster.objects.all("pods")} <= {"node-b", "node-c"}


def test_an_existing_job_is_adopted_and_not_recreated(cluster: Emulation) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    first = launcher(cluster)
    Running(first, job()).wait_for("ready")  # this launcher keeps running until the test ends, like one that hangs
    second = launcher(cluster)
    assert second.adopt(RUN, 1)
    running = Running(second, job())
    running.wait_for("ready")
    both_ready(cluster)
    assert cluster.server.requests.count(("create", "pytorchjobs")) == 2  # one of them found the existing job
    assert cluster.jobs() == [FIRST]
    second.stop()
    assert running.end().code == 204
    assert left(cluster) == set()


def test_a_launcher_stopped_before_it_follows_ends_the_adopted_job(cluster: Emulation) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    Running(launcher(cluster), job()).wait_for("ready")
    both_ready(cluster)
    second = launcher(cluster)
    assert second.adopt(RUN, 1)
    second.stop()
    assert Running(second, job()).end().code == ExitCode.PREEMPTED
    assert left(cluster) == set()


def test_jobs_of_older_launches_and_failed_ones_are_cleared_away(cluster: Emulation) -> None:
    cluster.kubelet.program = each(SERVE, SERVE)
    Running(launcher(cluster), job(launch=1)).wait_for("ready")
    assert not launcher(cluster).adopt(RUN, 2)
    assert left(cluster) == set()


def test_a_job_of_that_name_that_is_another_s_is_left_alone(cluster: Emulation) -> None:
    cluster.objects.create("pytorchjobs", {"metadata": {"name": FIRST}, "spec": {"runPolicy": {"suspend": True}}})
    with pytest.raises(SpecError, match=r"has another pytorchjobs\.kubeflow\.org called"):
        Running(launcher(cluster), job()).end()
    assert cluster.jobs() == [FIRST]


def test_an_unobserved_success_is_adopted(cluster: Emulation) -> None:
    cluster.kubelet.program = each("print('done')", DONE)
    assert Running(launcher(cluster), job()).end().code == 0
    second = launcher(cluster)
    assert second.adopt(RUN, 1)
    ending = Running(second, job()).end()
    assert ending.code == 0
    assert ending.log_tail == ("done",)


@pytest.mark.parametrize(
    "end",
    [
        lambda flow: flow["spec"].update(shutdown="Terminate"),
        lambda flow: flow["spec"].update(shutdown="Stop"),
        lambda flow: flow["spec"].update(activeDeadlineSeconds=0),
        lambda flow: flow["status"].update(phase="Failed"),
        lambda flow: flow["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
    ],
    ids=["terminate", "stop", "kfp", "failed", "deleted"],
)
def test_a_pipeline_that_was_ended_ends_the_job(cluster: Emulation, end: Callable[[Object], None]) -> None:
    cluster.start_workflow()
    cluster.kubelet.program = each(SERVE, SERVE)
    first = launcher(cluster, "launcher-1")
    running = Running(first, job())
    running.wait_for("ready")
    cluster.objects.change("workflows", "pipeline", end)
    first.stop()
    ending = running.end()
    assert ending.code == ExitCode.CANCELLED and not ending.retryable
    assert left(cluster) == set()


def test_an_evicted_launcher_leaves_the_job_which_belongs_to_the_pipeline(cluster: Emulation) -> None:
    workflow = cluster.start_workflow()
    cluster.kubelet.program = each(SERVE, SERVE)
    first = launcher(cluster, "launcher-1")
    with first.only_one(RUN):
        running = Running(first, job())
        both_ready(cluster)
        first.stop()
        assert running.end().code == ExitCode.PREEMPTED
    (left_job,) = cluster.objects.all("pytorchjobs")
    assert [owner["uid"] for owner in left_job["metadata"]["ownerReferences"]] == [workflow["metadata"]["uid"]]
    assert {pod["status"]["phase"] for pod in cluster.objects.all("pods")} == {"Running"}
    cluster.objects.delete("workflows", "pipeline")
    with cluster.objects.changed:
        assert cluster.objects.changed.wait_for(lambda: not left(cluster), PATIENCE), left(cluster)


def test_two_launchers_of_a_run_take_turns(cluster: Emulation) -> None:
    cluster.start_workflow()
    inside, order = threading.Event(), list[str]()

    def second() -> None:
        with launcher(cluster, "launcher-2").only_one(RUN):
            order.append("second")

    waiting = threading.Thread(target=second)
    with launcher(cluster, "launcher-1").only_one(RUN):
        waiting.start()
        assert not inside.wait(0.5)  # as long as the other launcher takes for two checks
        order.append("first")
    waiting.join(PATIENCE)
    assert order == ["first", "second"]
    assert left(cluster) == set()


def test_a_launcher_whose_pod_failed_is_replaced_immediately_and_ends_as_preempted(cluster: Emulation) -> None:
    cluster.start_workflow()
    cluster.kubelet.program = each(SERVE, SERVE)
    dead = launcher(cluster, "launcher-1")
    with dead.only_one(RUN):
        running = Running(dead, job())
        running.wait_for("ready")
        cluster.objects.change("pods", "launcher-1", lambda pod: pod["status"].update(phase="Failed"))
        with launcher(cluster, "launcher-2").only_one(RUN), pytest.raises(PreemptedError, match="another launcher"):
            running.end()
    assert cluster.jobs() == [FIRST]


def test_a_launcher_whose_lease_is_deleted_leaves_the_job_to_others(cluster: Emulation) -> None:
    cluster.start_workflow()
    cluster.kubelet.program = each(SERVE, SERVE)
    first = launcher(cluster, "launcher-1")
    with first.only_one(RUN):
        running = Running(first, job())
        running.wait_for("ready")
        cluster.objects.delete("leases", f"holdfast-{RUN}")
        with pytest.raises(PreemptedError, match="its lease is gone"):
            running.end()
    assert cluster.jobs() == [FIRST]


def test_the_lease_holder_is_identified_by_namespace_pod_name_and_uid(cluster: Emulation) -> None:
    cluster.start_workflow()
    with launcher(cluster, "launcher-1").only_one(RUN):
        (lease,) = cluster.objects.all("leases")
        first = cluster.objects.get("pods", "launcher-1")
        assert lease["spec"]["holderIdentity"] == f"pod/training/launcher-1/{first['metadata']['uid']}"
        cluster.objects.remove("pods", "launcher-1")
        cluster.objects.create("pods", {key: first[key] for key in ("spec", "status")} | {"metadata": {
            "name": "launcher-1", "labels": first["metadata"]["labels"]}})  # fmt: skip
        with launcher(cluster, "launcher-1").only_one(RUN):
            (new_lease,) = cluster.objects.all("leases")
            assert new_lease["spec"]["holderIdentity"] != lease["spec"]["holderIdentity"]


def test_a_lease_under_deletion_is_not_acquired(cluster: Emulation) -> None:
    cluster.start_workflow()
    taken = threading.Event()

    def second() -> None:
        with launcher(cluster, "launcher-2").only_one(RUN):
            taken.set()

    metadata = {"name": f"holdfast-{RUN}", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    blocked = cluster.operator.collect
    cluster.operator.collect = lambda: None  # type: ignore[method-assign]  # no garbage collector runs
    cluster.objects.create("leases", {"metadata": metadata, "spec": {"holderIdentity": "pod/training/gone/"}})
    waiting = threading.Thread(target=second)
    waiting.start()
    assert not taken.wait(1.0)  # as long as five checks take
    cluster.operator.collect = blocked  # type: ignore[method-assign]
    cluster.objects.change("leases", f"holdfast-{RUN}", lambda lease: lease["spec"].update(renewTime="now"))
    waiting.join(PATIENCE)
    assert taken.is_set()


@pytest.mark.parametrize("code", [429, 500, 503])
def test_throttling_and_server_errors_are_waited_out(cluster: Emulation, code: int) -> None:
    answers = iter([StatusError(code, "not now", 1 if code == 429 else None)] * 4)
    cluster.server.faults.append(lambda verb, plural: next(answers, None))
    cluster.kubelet.program = each("print('done')", DONE)
    ending = Running(launcher(cluster), job()).end()
    assert ending.code == 0
    assert ending.log_tail == ("done",)


def test_a_lost_reply_to_the_creation_makes_no_second_job(cluster: Emulation) -> None:
    lost = iter([True])

    def lose(verb: str, plural: str) -> StatusError | None:
        if verb == "create" and plural == "pytorchjobs" and next(lost, False):
            cluster.objects.create("pytorchjobs", body)
            return StatusError(500, "the reply is lost")
        return None

    (body,) = objects_for(job(), None)
    cluster.server.faults.append(lose)
    cluster.kubelet.program = each("print('done')", DONE)
    assert Running(launcher(cluster), job()).end().code == 0
    assert cluster.jobs() == [FIRST]


TICKS = "import time,sys\nfor n in range(40):\n    print('tick', n, flush=True)\n    time.sleep(0.1)"


def test_dropped_connections_forgotten_versions_and_an_outage_cost_no_line_and_no_watch(cluster: Emulation) -> None:
    cluster.kubelet.program = each(TICKS, DONE)
    running = Running(launcher(cluster), job())
    running.wait_for("tick 5")
    cluster.server.drop_connections()
    running.wait_for("tick 10")
    cluster.objects.forget()
    cluster.server.drop_connections()
    running.wait_for("tick 15")
    with cluster.server.outage():
        threading.Event().wait(1.0)  # the test is about the length of the outage
    ending = running.end()
    assert ending.code == 0
    assert ending.log_tail == tuple(f"tick {n}" for n in range(40))
    assert len(cluster.server.requests) < 200  # no busy loop sends requests


def test_a_token_that_expires_is_read_again(cluster: Emulation) -> None:
    cluster.kubelet.program = each(TICKS, DONE)
    running = Running(launcher(cluster), job())
    running.wait_for("tick 3")
    cluster.server.tokens = {"token-2"}
    cluster.token.write_text("token-2")
    cluster.server.drop_connections()
    ending = running.end()
    assert ending.code == 0
    assert ending.log_tail == tuple(f"tick {n}" for n in range(40))


NO_RIGHT = 'pods is forbidden: User "launcher" cannot list resource "pods" in API group "" in the namespace "training"'


def test_an_insufficient_role_is_reported_with_the_remedy(cluster: Emulation) -> None:
    cluster.server.faults.append(
        lambda verb, plural: StatusError(403, NO_RIGHT) if (verb, plural) == ("list", "pods") else None
    )
    cluster.kubelet.program = each(SERVE, SERVE)
    with pytest.raises(AccessDeniedError, match=r"cannot list resource .*; .*manifests/components/launcher"):
        Running(launcher(cluster), job()).end()
    with cluster.objects.changed:
        assert cluster.objects.changed.wait_for(lambda: not left(cluster), PATIENCE), left(cluster)


def test_a_persistent_name_conflict_fails_with_a_retryable_error_after_ten_tries(
    cluster: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.launch.kubernetes.launcher.MAKING_PAUSE", 0.0)
    follower = launcher(cluster)
    names: list[str] = []

    def refused(resource: object, body: Object) -> None:
        names.append(body["metadata"]["name"])
        raise ConflictError("the object has been modified")

    monkeypatch.setattr(follower._api, "create", refused)
    with pytest.raises(ClusterUnreachableError, match=r"could not be made in 10 tries.*has been modified") as error:
        follower._create(job())
    assert names == [FIRST] * 10
    assert error.value.exit_code.retryable


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "refused"])
def test_a_node_that_fails_its_health_check_is_labelled_or_a_remedy_is_logged(
    cluster: Emulation, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    cluster.server.may_patch_nodes = allowed
    cluster.kubelet.program = each("raise SystemExit(210)", QUIET)
    assert Running(launcher(cluster), job(health={"on_failure": "label"})).end().code == ExitCode.UNHEALTHY_NODE
    nodes = [cluster.objects.get("nodes", name)["metadata"] for name in cluster.kubelet.nodes]
    labels = [node["labels"].get("holdfast/health") for node in nodes]
    assert labels == ["failed" if allowed else None, *[None] * (len(nodes) - 1)]
    if allowed:
        assert nodes[0]["annotations"]["holdfast/health-found-by"].endswith(f"Z run {RUN} launch 1")
    assert ("apply manifests/components/node-health" in caplog.text) is not allowed
    assert left(cluster) == set()


@pytest.mark.parametrize(("code", "mark"), [(210, "nothing"), (201, "label")])
def test_no_node_is_labelled_by_default_or_for_an_ending_that_is_no_failed_check(
    cluster: Emulation, code: int, mark: str
) -> None:
    cluster.server.may_patch_nodes = True
    cluster.kubelet.program = each(f"raise SystemExit({code})", QUIET)
    assert Running(launcher(cluster), job(health={"on_failure": mark})).end().code == code
    labels = [cluster.objects.get("nodes", name)["metadata"]["labels"] for name in cluster.kubelet.nodes]
    assert not [label for label in labels if "holdfast/health" in label]


def test_pods_avoid_excluded_and_labelled_nodes_and_prefer_nodes_that_are_not_leaving() -> None:
    def avoided(mark: str) -> list[dict[str, object]]:
        plain = job(health={"on_failure": mark})
        launch = replace(plain, excluded_nodes=frozenset({"node-a"}), leaving_nodes=frozenset({"node-b"}))
        pod = objects_for(launch)[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (preference,) = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [rule["values"] for rule in preference["preference"]["matchExpressions"]] == [["node-b"]]
        (term,) = required["nodeSelectorTerms"]
        return term["matchExpressions"]

    excluded = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a"]}
    assert avoided("nothing") == [excluded]
    assert avoided("label") == [excluded, {"key": "holdfast/health", "operator": "NotIn", "values": ["failed"]}]
