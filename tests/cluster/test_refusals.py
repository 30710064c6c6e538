"""A cluster's refusals in the words that a user sees: pods that are never created, and pods that never run."""

import copy
import logging
import sys
from collections.abc import Callable

import pytest

from holdfast.launch.emitters import objects_for
from holdfast.launch.kubernetes import KubernetesLauncher, launcher
from holdfast.spec import ExitCode
from tests.cluster.emulation import Emulation
from tests.cluster.objects import NAMESPACE, Object
from tests.launch.kubernetes.conftest import RUN, Running, in_vain, job, settings

NAME = f"holdfast-{RUN}-1"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def emitted() -> Object:
    """The job object of two nodes as Holdfast creates it, without the key that its launcher creates."""
    (body,) = copy.deepcopy(objects_for(job(), None))
    for replica in body["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        container["env"] = [variable for variable in container["env"] if variable["name"] != "HOLDFAST_LAUNCH_KEY"]
    return body


def with_a_master(found: Object) -> Object:
    """The same job with a master before the workers: the operator then adds its init container to the workers."""
    replicas = found["spec"]["pytorchReplicaSpecs"]
    replica = next(iter(replicas.values()))
    found["spec"]["pytorchReplicaSpecs"] = {"Master": {**replica, "replicas": 1}, "Worker": {**replica, "replicas": 1}}
    return found


def serve(pod: Object) -> list[str]:
    return [sys.executable, "-c", "import time; time.sleep(600)"]


def messages(cluster: Emulation) -> list[str]:
    return [event["message"] for event in cluster.objects.all("events", NAMESPACE) if event["type"] == "Warning"]


def until(cluster: Emulation, check: Callable[[], object]) -> None:
    with cluster.objects.changed:
        assert cluster.objects.changed.wait_for(check, 180), (messages(cluster), cluster.objects.all("pods"))


def phases(cluster: Emulation) -> dict[str, str]:
    pods = cluster.objects.all("pods", NAMESPACE)
    return {pod["metadata"]["name"].removeprefix(f"{NAME}-"): pod.get("status", {}).get("phase", "") for pod in pods}


def test_a_namespace_that_is_restricted_refuses_the_operator_s_init_container_and_nothing_of_ours(
    cluster: Emulation,
) -> None:
    cluster.kubelet.program = serve
    cluster.label_namespace(RESTRICTED)
    cluster.objects.create("pytorchjobs", with_a_master(emitted()))
    until(cluster, lambda: messages(cluster))
    (message,) = messages(cluster)
    assert message.startswith(
        f'Error creating: pods "{NAME}-worker-0" is forbidden: violates PodSecurity "restricted:latest": '
        'allowPrivilegeEscalation != false (container "init-pytorch" must set'
    ), message
    assert "pytorch-0" not in message
    until(cluster, lambda: phases(cluster) == {"master-0": "Running"})  # which waits for its worker


def test_without_a_master_a_restricted_namespace_takes_every_pod(cluster: Emulation) -> None:
    cluster.kubelet.program = serve
    cluster.label_namespace(RESTRICTED)
    cluster.objects.create("pytorchjobs", emitted())
    until(cluster, lambda: phases(cluster) == {"worker-0": "Running", "worker-1": "Running"})
    assert messages(cluster) == []


def test_the_init_container_of_a_worker_times_out_without_a_master(cluster: Emulation) -> None:
    cluster.kubelet.program = lambda pod: None if "worker" in pod["metadata"]["name"] else {"phase": "Pending"}
    cluster.kubelet.master_wait = 1.0
    cluster.objects.create("pytorchjobs", with_a_master(emitted()))
    until(cluster, lambda: phases(cluster).get("worker-0") == "Failed")
    worker = cluster.objects.get("pods", f"{NAME}-worker-0")
    assert worker is not None
    assert worker["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 1


def test_a_quota_refuses_excess_pods_with_requested_used_and_limited(cluster: Emulation) -> None:
    cluster.kubelet.program = serve
    cluster.set_quota({"pods": "1"})
    cluster.objects.create("pytorchjobs", emitted())
    until(cluster, lambda: messages(cluster))
    assert messages(cluster)[0].endswith(
        "is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1"
    )
    assert len(phases(cluster)) == 1


def test_a_missing_service_account_is_reported(cluster: Emulation) -> None:
    body = emitted()
    for replica in body["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["serviceAccountName"] = "holdfast-train"
    cluster.objects.create("pytorchjobs", body)
    until(cluster, lambda: messages(cluster))
    assert 'serviceaccount "holdfast-train" not found' in messages(cluster)[0]
    assert phases(cluster) == {}


def test_a_container_over_its_memory_limit_is_killed_whole_with_reason_oomkilled(cluster: Emulation) -> None:
    greedy = "import time; kept = bytearray(2**28); time.sleep(600)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{greedy}'])"
    cluster.kubelet.program = lambda pod: [sys.executable, "-c", start]
    body = emitted()
    for replica in body["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["resources"] = {"limits": {"memory": "128Mi"}}
    cluster.objects.create("pytorchjobs", body)

    def ended() -> list[Object]:
        states = [pod.get("status", {}).get("containerStatuses") or [{}] for pod in cluster.objects.all("pods")]
        return [state["terminated"] for (status, *_) in states if "terminated" in (state := status.get("state", {}))]

    until(cluster, ended)
    assert (ended()[0]["exitCode"], ended()[0]["reason"]) == (137, "OOMKilled")


def test_a_container_whose_settings_are_not_there_waits_and_names_them(cluster: Emulation) -> None:
    body = emitted()
    for replica in body["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": "holdfast-settings"}}]
    cluster.objects.create("pytorchjobs", body)

    def waiting() -> list[Object]:
        states = [pod.get("status", {}).get("containerStatuses") or [{}] for pod in cluster.objects.all("pods")]
        states_waiting = [status.get("state", {}).get("waiting", {}) for (status, *_) in states]
        return [state for state in states_waiting if state.get("reason") == "CreateContainerConfigError"]

    until(cluster, waiting)
    assert waiting()[0]["message"] == 'configmap "holdfast-settings" not found'


def test_an_object_with_an_owner_in_another_namespace_is_collected(cluster: Emulation) -> None:
    cluster.label_namespace({}, "kubeflow")
    owner = cluster.objects.create("configmaps", {"metadata": {"name": "owner", "namespace": "kubeflow"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    cluster.objects.create("configmaps", {"metadata": {"name": "owned", "ownerReferences": [reference]}})
    until(cluster, lambda: cluster.objects.get("configmaps", "owned") is None)


def test_the_launcher_names_what_refuses_half_of_a_gang_and_gives_the_job_up_in_its_time(
    cluster: Emulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast.launch")
    monkeypatch.setattr(launcher, "objects_for", lambda job, owner: (with_a_master(emitted()),))
    in_vain(monkeypatch, lambda: "init-pytorch" in caplog.text)
    cluster.kubelet.program = serve
    cluster.label_namespace(RESTRICTED)
    ending = Running(KubernetesLauncher(settings(), cluster.api()), job()).end()
    assert ending.code == ExitCode.ACCESS_DENIED
    assert 'violates PodSecurity "restricted:latest"' in ending.detail
    assert "init-pytorch" in ending.detail
    assert f"waiting: {ending.detail.partition(' (cluster.pending_timeout_minutes')[0]}" in caplog.text
    until(cluster, lambda: cluster.jobs() == [])


def test_the_launcher_names_the_quota_that_half_of_a_gang_is_beyond_and_gives_the_job_up_in_its_time(
    cluster: Emulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast.launch")
    in_vain(monkeypatch, lambda: "1 of 2 pods" in caplog.text and "exceeded quota" in caplog.text)
    cluster.kubelet.program = serve
    cluster.set_quota({"pods": "1"})
    ending = Running(KubernetesLauncher(settings(), cluster.api()), job()).end()
    assert ending.code == ExitCode.UNSCHEDULABLE
    assert "1 of 2 pods" in ending.detail and "exceeded quota: small" in ending.detail
    assert f"waiting: {ending.detail.partition(' (cluster.pending_timeout_minutes')[0]}" in caplog.text
    until(cluster, lambda: cluster.jobs() == [])
