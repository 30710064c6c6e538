"""A launcher whose pipeline is in one namespace and whose jobs are in another, against a real API server."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.launch.kubernetes import KubernetesLauncher, lease
from holdfast.launch.kubernetes.client import LEASES
from holdfast.launch.kubernetes.lease import RunLease
from holdfast.launch.kubernetes.owner import find_own_pod
from holdfast.runtime.node import NAMESPACE_VARIABLE
from tests.envtest.control_plane import ADMIN, NAMESPACE, ControlPlane, assets
from tests.launch.kubernetes.conftest import RUN, settings

HOME = "profile"  # where the pipeline runs
POD = {
    "apiVersion": "v1", "kind": "Pod",
    "spec": {"containers": [{"name": "main", "image": "nothing"}], "automountServiceAccountToken": False},
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(assets() is None, reason="needs KUBEBUILDER_ASSETS"),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    binaries = assets()
    assert binaries is not None
    with ControlPlane(binaries, tmp_path_factory.mktemp("envtest")) as running:
        running.kubectl("create", "namespace", HOME)
        yield running


def make_pod(plane: ControlPlane, name: str) -> None:
    plane.kubectl("apply", "-f", "-", text=json.dumps({**POD, "metadata": {"name": name, "namespace": HOME}}))


def held(plane: ControlPlane) -> dict[str, Any]:
    leases = json.loads(plane.kubectl("get", "leases", "-n", NAMESPACE, "-o", "json"))["items"]
    return leases[0] if leases else {}


def test_a_launcher_is_found_alive_in_its_own_namespace_and_given_up_when_its_pod_is_gone(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMESPACE_VARIABLE, HOME)
    monkeypatch.setattr(lease, "POLL", 0.2)
    make_pod(plane, "launcher-1")
    make_pod(plane, "launcher-2")
    first = KubernetesLauncher(settings(), plane.api(ADMIN), "launcher-1")
    taken = threading.Event()

    def second() -> None:
        with KubernetesLauncher(settings(), plane.api(ADMIN), "launcher-2").only_one(RUN):
            taken.set()

    with first.only_one(RUN):
        assert held(plane)["spec"]["holderIdentity"].startswith(f"pod/{HOME}/launcher-1/")
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not taken.wait(2.0)  # ten checks of a living one
        plane.kubectl("delete", "pod", "launcher-1", "-n", HOME, "--force", "--grace-period=0")
        assert taken.wait(180)  # long before the lease expires
    waiting.join(180)
    assert held(plane) == {}, "a lease that is given back is gone immediately, with no finalizer left"


def test_a_dying_lease_is_waited_for(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "POLL", 0.2)
    api = plane.api(ADMIN)
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": f"holdfast-{RUN}"},
        "spec": {},
    }
    lease_body = api.create(LEASES, body)
    api.delete(LEASES, lease_body["metadata"]["name"])  # deleted in the foreground: its finalizer stays
    taken = threading.Event()

    def take() -> None:
        with RunLease(api, RUN, None, []):
            taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not taken.wait(2.0)
    plane.finish_deletions("leases")
    assert taken.wait(180)
    waiting.join(180)
    assert held(plane) == {}


def test_a_lease_holder_detects_the_deletion_of_its_lease(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW", 0.3)
    with RunLease(plane.api(ADMIN), RUN, None, []) as mine:
        plane.kubectl("delete", "lease", f"holdfast-{RUN}", "-n", NAMESPACE)
        assert mine.replaced.wait(180)
    assert held(plane) == {}


def test_an_owner_is_named_in_its_own_namespace_only(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pod(plane, "launcher-3")
    home = plane.api(ADMIN).within(HOME)
    assert (pod := find_own_pod(home, "launcher-3")) is not None and pod.uid
    flow = {"kind": "Workflow", "name": "pipeline", "uid": "0", "apiVersion": "argoproj.io/v1alpha1"}
    patch = json.dumps({"metadata": {"ownerReferences": [flow]}})
    plane.kubectl("patch", "pod", "launcher-3", "-n", HOME, "--type=merge", f"--patch={patch}")
    monkeypatch.setenv(NAMESPACE_VARIABLE, HOME)
    for api, owners in ((home, ["pipeline"]), (plane.api(ADMIN), [])):
        with KubernetesLauncher(settings(), api, "launcher-3").only_one(RUN):
            lease = json.loads(plane.kubectl("get", "leases", "-n", api.namespace, "-o", "json"))["items"][0]
            assert [owner["name"] for owner in lease["metadata"].get("ownerReferences", [])] == owners
