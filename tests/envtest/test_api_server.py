"""The launcher and the manifests against a real API server with the official CRDs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.components.launch.kubernetes import KubernetesLauncher
from holdfast.components.spec import ExitCode
from holdfast.components.spec.errors import AccessDeniedError
from tests.envtest.control_plane import NAMESPACE, ControlPlane, assets
from tests.kubernetes_schemas import FOLDER as CRDS
from tests.launch.kubernetes.conftest import RUN, Running, job, settings

MANIFESTS = Path(__file__).parents[2] / "manifests"
NAME = f"holdfast-{RUN}-1"
NOT_OURS = {"monitoring.coreos.com", "argoproj.io"}  # installed by others, and no CRD of theirs is at hand
ROLE = {
    "kubeflow.org": ["pytorchjobs"],
    "trainer.kubeflow.org": ["trainjobs", "trainingruntimes"],
    "batch.volcano.sh": ["jobs"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        assets() is None or not CRDS.is_dir(),
        reason="needs etcd, kube-apiserver and kubectl in KUBEBUILDER_ASSETS (setup-envtest use -p path), "
        "and the official CRDs in HOLDFAST_CRDS",
    ),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server on which the launcher's service account has its role, and no more."""
    binaries = assets()
    assert binaries is not None
    with ControlPlane(binaries, tmp_path_factory.mktemp("envtest")) as running:
        running.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(launcher_role()))
        yield running


def launcher_role() -> list[dict[str, object]]:
    """Least privilege: what the launcher says that it needs."""
    follow, jobs = ["get", "list", "watch"], ["create", "get", "list", "watch", "delete"]
    rules = [{"apiGroups": [group], "resources": names, "verbs": jobs} for group, names in ROLE.items()]
    rules += [
        {"apiGroups": [""], "resources": ["pods"], "verbs": follow},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["get"]},
        {
            "apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
            "verbs": ["create", "get", "update", "delete"],
        },
    ]  # fmt: skip
    api = "rbac.authorization.k8s.io/v1"
    metadata = {"name": "holdfast-launcher", "namespace": NAMESPACE}
    subject = {"kind": "ServiceAccount", "name": "holdfast-launcher", "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "holdfast-launcher"}
    return [
        {"apiVersion": api, "kind": "Role", "metadata": metadata, "rules": rules},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": metadata, "subjects": [subject], "roleRef": reference},
    ]


def until(check: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until it is so: nothing tells a test of this server's changes."""
    for _ in range(int(seconds * 5)):
        if check():
            return
        threading.Event().wait(0.2)
    raise AssertionError("it did not come true")


KINDS = {
    "pytorchjob": ("pytorchjobs.kubeflow.org", {}),
    "trainjob": ("trainjobs.trainer.kubeflow.org", {}),
    "volcano": ("jobs.batch.volcano.sh", {"scheduler": "volcano"}),
}


def status(kind: str, succeeded: bool) -> dict[str, object]:
    """What the kind's controller says of an ending."""
    now = "2026-01-01T00:00:00Z"
    if kind == "volcano":
        return {"state": {"phase": "Completed" if succeeded else "Failed", "lastTransitionTime": now}}
    word = ({"trainjob": "Complete"}.get(kind, "Succeeded")) if succeeded else "Failed"
    times = {"lastTransitionTime": now} | ({"lastUpdateTime": now} if kind == "pytorchjob" else {})
    condition = {"type": word, "status": "True", "reason": word, "message": "said by the test", **times}
    return {"conditions": [condition]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("succeeded", [True, False], ids=["succeeded", "failed"])
def test_a_job_is_made_watched_to_its_end_and_cleared_away(plane, kind, succeeded) -> None:
    resource, more = KINDS[kind]
    cluster = settings(job=kind, **more)
    launcher = KubernetesLauncher(cluster, plane.api())
    with launcher.only_one(RUN):
        assert not launcher.adopt(RUN, 1)
        running = Running(launcher, job(job=kind, **more))
        until(lambda: NAME in plane.kubectl("get", resource, "-n", NAMESPACE, "-o", "name"))
        assert KubernetesLauncher(cluster, plane.api()).adopt(RUN, 1)
        plane.say(resource, NAME, status(kind, succeeded))
        until(lambda: plane.finish_deletions(resource) or running.ending or running.error)
        ending = running.end()
    assert ending.code == (ExitCode.OK if succeeded else ExitCode.KILLED)
    plane.kubectl("delete", resource, "--all", "-n", NAMESPACE, "--wait=false")
    plane.finish_deletions(resource)
    if kind == "trainjob":
        plane.finish_deletions("trainingruntimes.trainer.kubeflow.org")
    assert plane.kubectl("get", f"{resource},leases", "-n", NAMESPACE, "-o", "name") == ""


def test_another_namespace_is_closed_to_the_launcher(plane) -> None:
    api = plane.api()
    api.namespace = "default"
    with pytest.raises(AccessDeniedError, match="cannot list resource"):
        KubernetesLauncher(settings(), api).adopt(RUN, 1)


def overlays() -> list[Path]:
    """Every folder of manifests that stands for a whole installation."""
    return sorted(path.parent for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))


@pytest.mark.parametrize("overlay", overlays(), ids=lambda path: path.name)
def test_every_overlay_is_accepted_by_the_server(plane, overlay) -> None:
    binaries = assets()
    assert binaries is not None
    rendered = subprocess.run(
        [str(binaries / "kubectl"), "kustomize", str(overlay)], capture_output=True, text=True, check=True
    )
    documents = [document for document in yaml.safe_load_all(rendered.stdout) if document]
    served = plane.served_groups()
    for document in documents:
        if document["kind"] == "Namespace":  # a dry run of what lies in it needs it
            plane.kubectl("apply", "-f", "-", text=yaml.safe_dump(document))
    for document in documents:
        group = document["apiVersion"].rpartition("/")[0]
        if group not in served:
            assert group in NOT_OURS, f"no CRD of {group} is at hand"
            continue
        plane.kubectl("apply", "--dry-run=server", "-f", "-", text=yaml.safe_dump(document))
