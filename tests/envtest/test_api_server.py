"""The launcher and the manifests against a real API server with the official CRDs."""

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch import GangExit
from holdfast.launch.emitters import objects_for
from holdfast.launch.kubernetes import KubernetesLauncher
from holdfast.launch.kubernetes.client import NODES
from holdfast.launch.kubernetes.launcher import label_unhealthy
from holdfast.spec import ExitCode
from holdfast.spec.errors import AccessDeniedError, HoldfastError
from tests.envtest.control_plane import (
    MANIFESTS,
    NAMESPACE,
    ControlPlane,
    assets,
    needs_assets,
    start_control_plane,
    until,
)
from tests.launch.kubernetes.conftest import RUN, Running, job, settings

NAME = f"holdfast-{RUN}-1"
NOT_OURS = {"monitoring.coreos.com", "argoproj.io"}  # installed by others; their CRDs are missing here

pytestmark = [pytest.mark.slow, needs_assets]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with the official CRDs."""
    with start_control_plane(tmp_path_factory.mktemp("envtest")) as running:
        yield running


RESOURCES = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "volcano": "jobs.batch.volcano.sh",
}
JOBS: dict[str, dict[str, Any]] = {
    "a PyTorchJob": {"job": "pytorchjob"},
    "an elastic PyTorchJob": {"job": "pytorchjob", "nodes": {"min": 1, "max": 2}},
    "a PyTorchJob with spares": {"job": "pytorchjob", "spares": 1, "scheduler": "volcano"},
    "a TrainJob": {"job": "trainjob"},
    "a Volcano Job": {"job": "volcano", "scheduler": "volcano"},
}
of_each_kind = pytest.mark.parametrize("cluster", JOBS.values(), ids=JOBS)


def status(kind: str, succeeded: bool) -> dict[str, object]:
    """The status that the kind's controller writes about an ending."""
    now = "2026-01-01T00:00:00Z"
    if kind == "volcano":
        return {"state": {"phase": "Completed" if succeeded else "Failed", "lastTransitionTime": now}}
    outcome = ({"trainjob": "Complete"}.get(kind, "Succeeded")) if succeeded else "Failed"
    times = {"lastTransitionTime": now} | ({"lastUpdateTime": now} if kind == "pytorchjob" else {})
    condition = {"type": outcome, "status": "True", "reason": outcome, "message": "set by the test", **times}
    return {"conditions": [condition]}


@of_each_kind
def test_the_server_knows_every_field_of_a_job(plane: ControlPlane, cluster: dict[str, Any]) -> None:
    for manifest in objects_for(job(**cluster)):
        text = json.dumps(manifest)
        plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", NAMESPACE, "-f", "-", text=text)


@of_each_kind
@pytest.mark.parametrize("succeeded", [True, False], ids=["succeeded", "failed"])
def test_a_job_is_made_watched_to_its_end_and_cleared_away(
    plane: ControlPlane, cluster: dict[str, Any], succeeded: bool
) -> None:
    kind = cluster["job"]
    resource = RESOURCES[kind]
    launcher = KubernetesLauncher(settings(**cluster), plane.api())
    with launcher.only_one(RUN):
        assert not launcher.adopt(RUN, 1)
        running = Running(launcher, job(**cluster))
        until(plane, lambda: NAME in plane.kubectl("get", resource, "-n", NAMESPACE, "-o", "name"))
        assert KubernetesLauncher(settings(**cluster), plane.api()).adopt(RUN, 1)
        plane.say(resource, NAME, status(kind, succeeded))

        def ended() -> bool:
            plane.finish_deletions(resource)
            return running.ending is not None or running.error is not None

        until(plane, ended)
        ending = running.end()
    assert ending.code == (ExitCode.OK if succeeded else ExitCode.KILLED)
    plane.kubectl("delete", resource, "--all", "-n", NAMESPACE, "--wait=false")
    plane.finish_deletions(resource)
    if kind == "trainjob":
        plane.finish_deletions("trainingruntimes.trainer.kubeflow.org")
    assert plane.kubectl("get", f"{resource},leases", "-n", NAMESPACE, "-o", "name") == ""


def test_another_namespace_is_closed_to_the_launcher(plane: ControlPlane) -> None:
    api = plane.api()
    api.namespace = "default"
    with pytest.raises(AccessDeniedError, match="cannot list resource"):
        KubernetesLauncher(settings(), api).adopt(RUN, 1)


def overlays() -> list[Path]:
    """Every folder of manifests that is a whole installation."""
    return sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))


@pytest.mark.parametrize("overlay", overlays(), ids=lambda path: path.name)
def test_every_overlay_is_accepted_by_the_server(plane: ControlPlane, overlay: Path) -> None:
    binaries = assets()
    assert binaries is not None
    rendered = subprocess.run(
        [str(binaries / "kubectl"), "kustomize", str(overlay)], capture_output=True, text=True, check=True
    )
    documents = [document for document in yaml.safe_load_all(rendered.stdout) if document]
    served = plane.served_groups()
    names = {document["metadata"].get("namespace") for document in documents} - {None}
    for name in names:  # a dry run of its content needs it, and a profile's namespace is Kubeflow's
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        plane.kubectl("apply", "-f", "-", text=yaml.safe_dump(namespace))
    for document in documents:
        group = document["apiVersion"].rpartition("/")[0]
        if group not in served:
            assert group in NOT_OURS, f"no CRD of {group} is at hand"
            continue
        plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=yaml.safe_dump(document))


def test_the_launcher_may_label_a_node_that_failed_and_change_nothing_else_of_it(plane: ControlPlane) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "labels": {"pool": "h100"}}}
    plane.kubectl("apply", "-f", "-", text=yaml.safe_dump(node))
    ending, failed = GangExit(ExitCode.UNHEALTHY_NODE, (), blamed_nodes=frozenset({"node-a"})), {"on_failure": "label"}

    def label() -> str | None:
        label_unhealthy(plane.api(), job(health=failed), ending)
        return json.loads(plane.kubectl("get", "node", "node-a", "-o", "json"))["metadata"]["labels"].get(
            "holdfast/health"
        )

    assert label() is None  # without the component
    for document in node_health():
        plane.kubectl("apply", "--server-side", "-f", "-", text=yaml.safe_dump(document))
    until(plane, lambda: label() == "failed")  # the authorizer reads a binding slightly later
    assert label() == "failed"

    numbers = itertools.count()

    def change(spec: dict[str, object] | None = None, **metadata: object) -> str:
        """The server's answer to such a change."""
        body = {**node, "metadata": {"name": "node-a", **metadata}, **({"spec": spec} if spec else {})}
        try:
            plane.api().apply(NODES, body, f"test-{next(numbers)}")  # each is a new field manager
        except HoldfastError as error:
            return str(error)
        return ""

    # It reads a policy slightly later, too.
    until(plane, lambda: "but holdfast/health to failed" in change(labels={"pool": f"mine-{next(numbers)}"}))
    assert "but holdfast/health-found-by" in change(annotations={"a": "b"})
    assert "but its label holdfast/health" in change(spec={"unschedulable": True})
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "missing", "uid": "of-missing"}  # else the node is collected
    assert "no owner" in change(ownerReferences=[owner])
    assert "no finalizer" in change(finalizers=["example.com/stays"])
    assert "but holdfast/health to failed" in change(labels={"holdfast/health": "well"})
    assert label() == "failed"


def node_health() -> list[dict[str, Any]]:
    """The component, for the namespace of these tests."""
    folder = MANIFESTS / "components" / "node-health"
    text = "---\n".join((folder / name).read_text() for name in ("rbac.yaml", "policy.yaml"))
    return list(yaml.safe_load_all(text.replace("namespace: holdfast\n", f"namespace: {NAMESPACE}\n")))
