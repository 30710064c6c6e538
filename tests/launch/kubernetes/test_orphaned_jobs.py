"""The exit handler of a pipeline ends what a killed launcher leaves, in any namespace. It does not touch a job that
a living launcher follows."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from holdfast.components.notify.__main__ import body
from holdfast.launch.kubernetes import KubernetesLauncher, lease
from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.lease import HeldError, RunLease
from holdfast.launch.kubernetes.orphaned_jobs import end_orphaned_jobs
from holdfast.launch.kubernetes.owner import find_own_pod
from holdfast.pipelines.backends.cleanup import clean_up_cluster
from holdfast.pipelines.backends.interface import CANCELED, RUNNING, SUCCEEDED, RunStatus
from holdfast.pipelines.backends.record import Record
from holdfast.spec import dump_spec
from tests.cluster.api import PLURALS
from tests.cluster.emulation import Emulation
from tests.cluster.kubelet import NOT_RUN
from tests.faults.nodes import PATIENCE
from tests.launch.kubernetes.conftest import RUN, SERVE, Running, each, job, settings
from tests.train.tiny_run import new_store, tiny_spec

FIRST = f"holdfast-{RUN}-1"
HOME = "team"  # the pipeline's namespace
ROLE = Path(__file__).parents[3] / "manifests" / "base" / "notify-role.yaml"


def rights() -> dict[str, set[str]]:
    """The exit handler's permissions in the manifests."""
    rules = yaml.safe_load(ROLE.read_text())["rules"]
    return {resource: set(rule["verbs"]) for rule in rules for resource in rule["resources"]}


@pytest.fixture
def abroad(cluster: Emulation, monkeypatch: pytest.MonkeyPatch) -> Emulation:
    """A pipeline in another namespace than its jobs."""
    cluster.server.elsewhere[HOME] = {"pods": {"get"}, "workflows": {"get"}}
    cluster.start_workflow(pods=())
    for name in ("launcher-1", "launcher-2", "notify"):
        metadata = {"name": name, "namespace": HOME, "labels": {"workflows.argoproj.io/workflow": "pipeline"}}
        cluster.objects.create("pods", {"metadata": metadata, "spec": {"schedulerName": NOT_RUN, "containers": [
            {"name": "main", "image": "holdfast"}]}, "status": {"phase": "Running"}})  # fmt: skip
    flow = {"metadata": {"name": "pipeline", "namespace": HOME}, "spec": {}, "status": {"phase": "Running"}}
    cluster.objects.create("workflows", flow)
    monkeypatch.setenv("HOLDFAST_POD_NAMESPACE", HOME)
    cluster.kubelet.program = each(SERVE, SERVE)
    return cluster


def launcher(cluster: Emulation, pod: str) -> KubernetesLauncher:
    return KubernetesLauncher(settings(namespace="training"), cluster.api(), pod)


def killed(cluster: Emulation, pod: str = "launcher-1", phase: str = "Failed") -> None:
    """The launcher in `pod` creates a job and dies silently. Its lease remains."""
    first = launcher(cluster, pod)
    lease = RunLease(cluster.api(), RUN, first._pod, [])
    lease._acquire()
    first._create(job())
    changed = cluster.objects.changed
    with changed:
        assert changed.wait_for(lambda: len(cluster.objects.all("pods", "training")) == 2, PATIENCE)
    cluster.objects.change("pods", pod, lambda found: found["status"].update(phase=phase), namespace=HOME)


def left(cluster: Emulation) -> set[str]:
    return {
        manifest["metadata"]["name"] for plural in PLURALS for manifest in cluster.objects.all(plural, "training")
    } - {"pipeline"}


def as_exit_handler(cluster: Emulation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the exit handler prints in its pod, with the permissions of its role."""
    cluster.server.allowed = rights()
    cluster.server.elsewhere[HOME] = rights()
    environment = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOLDFAST_POD_NAME": "notify", "HOLDFAST_POD_NAMESPACE": HOME,
        "HOLDFAST_RUN_ID": RUN,
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Api, "of_this_process", lambda patience: cluster.api(patience).within(HOME))
    spec = dump_spec(tiny_spec("cluster.namespace=training"))
    return str(body(spec, (), new_store(folder / "store").url, "", "", "", "Failed").result["text"])


def test_a_pipeline_that_was_ended_in_another_namespace_leaves_nothing(
    abroad: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(abroad)
    assert left(abroad) >= {FIRST, f"holdfast-{RUN}"}
    output = as_exit_handler(abroad, tmp_path, monkeypatch)
    assert f"happened: job {FIRST} was ended: no launcher followed it any more" in output
    with abroad.objects.changed:
        assert abroad.objects.changed.wait_for(lambda: not left(abroad), PATIENCE), left(abroad)


def test_an_unreadable_launcher_counts_as_dead_when_its_lease_expires(abroad: Emulation) -> None:
    killed(abroad, phase="Running")
    assert end_orphaned_jobs(abroad.api(), RUN, "pytorchjob", duration=1.0, patience=PATIENCE) == [FIRST]
    with abroad.objects.changed:
        assert abroad.objects.changed.wait_for(lambda: not left(abroad), PATIENCE), left(abroad)


def test_the_living_launcher_of_another_pipeline_keeps_its_job(
    abroad: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = launcher(abroad, "launcher-2")
    with other.only_one(RUN):
        running = Running(other, job())
        running.wait_for("ready")
        now = [0.0]  # for the waiting launcher: it continues once the living one has renewed, however late that is

        def version() -> str:
            return str(abroad.objects.get("leases", f"holdfast-{RUN}")["metadata"]["resourceVersion"])

        def sleep(_: float) -> None:
            old_version = version()
            with abroad.objects.changed:
                assert abroad.objects.changed.wait_for(lambda: version() != old_version, PATIENCE)
            now[0] += 2.0

        monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        with pytest.raises(HeldError, match="pod/team/launcher-2/"):
            end_orphaned_jobs(abroad.api(), RUN, "pytorchjob", duration=6.0, patience=8.0)
        assert abroad.jobs() == [FIRST]
        assert abroad.objects.get("leases", f"holdfast-{RUN}")["spec"]["holderIdentity"] == str(other._pod)
        other._check()
        other.stop()
        running.launcher._pipeline = None
        running.end()


def test_a_launcher_that_comes_meanwhile_waits_and_is_alone_then(abroad: Emulation) -> None:
    killed(abroad)
    notify = find_own_pod(abroad.api().within(HOME), "notify")
    inside = threading.Event()

    def second() -> None:
        with launcher(abroad, "launcher-2").only_one(RUN):
            inside.set()

    waiting = threading.Thread(target=second)
    with RunLease(abroad.api(), RUN, notify, [], patience=PATIENCE):
        waiting.start()
        assert not inside.wait(1.0)  # as long as five checks take
    waiting.join(PATIENCE)
    assert inside.is_set()


def test_a_succeeded_job_is_kept_for_its_ttl(abroad: Emulation) -> None:
    abroad.kubelet.program = each("print('done')", "pass")
    assert Running(launcher(abroad, "launcher-1"), job()).end().code == 0
    assert end_orphaned_jobs(abroad.api(), RUN, "pytorchjob") == []
    assert abroad.jobs() == [FIRST]


def test_a_missing_permission_is_logged_and_not_raised(
    abroad: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(abroad)
    monkeypatch.setattr("tests.launch.kubernetes.test_orphaned_jobs.rights", lambda: {"pods": {"get"}})
    output = as_exit_handler(abroad, tmp_path, monkeypatch)
    assert "note: whether a job of the run is left: " in output and "cannot get" in output


def test_cancelling_a_run_that_has_ended_ends_the_job_that_it_left(abroad: Emulation) -> None:
    spec = dump_spec(tiny_spec("cluster.namespace=training"))
    record = Record("argo", "story-1", RUN, "story", spec, 0.0)
    running = RunStatus("argo", "story-1", "story", RUNNING)
    killed(abroad)
    api = abroad.api()
    assert clean_up_cluster(record, running, api) == []
    assert clean_up_cluster(record, replace(running, state=SUCCEEDED), api) == []
    assert abroad.jobs() == [FIRST]
    assert clean_up_cluster(record, replace(running, state=CANCELED), api) == [FIRST]
    with abroad.objects.changed:
        assert abroad.objects.changed.wait_for(lambda: not left(abroad), PATIENCE), left(abroad)
