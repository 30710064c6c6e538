"""A real API server under the emulated operator, nodes and garbage collector. `tests.envtest` starts it; this module
adds the rest of a cluster."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.cluster.client import Client
from tests.cluster.logs import NodeLogs
from tests.cluster.objects import NAMESPACE, Object, StatusError
from tests.cluster.remote import ServerObjects
from tests.envtest.control_plane import ADMIN, LAUNCHER, ControlPlane, assets, start_control_plane

CLEARED = ("pytorchjobs", "trainjobs", "trainingruntimes", "jobs", "workflows", "pods", "leases", "events",
           "configmaps", "resourcequotas", "limitranges")  # fmt: skip


def _lenient(plural: str, kind: str) -> Object:
    """A definition that accepts any object: the schemas include no official one of Argo."""
    names = {"plural": plural, "kind": kind, "singular": kind.lower(), "listKind": f"{kind}List"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.argoproj.io"},
        "spec": {"group": "argoproj.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }


WORKFLOWS = (_lenient("workflows", "Workflow"), _lenient("workflowtemplates", "WorkflowTemplate"))


@contextmanager
def cluster_plane(folder: Path) -> Iterator[ControlPlane | None]:
    """A real API server for an emulated cluster, or None where its binaries are not installed."""
    if assets() is None:
        yield None
        return
    (folder / "plane").mkdir(parents=True)
    with start_control_plane(folder / "plane", accounts=True) as plane:
        plane.install(*WORKFLOWS)
        yield plane


class RealServer:
    """`with RealServer(plane, folder) as server`: an empty cluster on a control plane that may have been used
    before."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.url = plane, plane.url
        self.objects = ServerObjects(Client(lambda: plane.configuration(ADMIN)))
        self.logs: Any = lambda name: None
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._clear()
        node = self._stack.enter_context(NodeLogs(self._folder, self._log_of))
        self._stack.enter_context(self.objects)
        self.port = node.port
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._clear()

    def add_node(self, name: str) -> None:
        """A node whose kubelet is this process."""
        client = self.objects.client
        if client.get("nodes", name) is not None:
            client.delete("nodes", name)
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        labels = {"kubernetes.io/hostname": name}
        self.objects.create("nodes", {"metadata": {"name": name, "labels": labels}, "status": status})

    def users(self) -> Object:
        """How a kubeconfig names the server and its user."""
        return {
            "cluster": {"server": self.url, "certificate-authority": str(self.plane.certificate)},
            "user": {"token": LAUNCHER},
        }

    def outage(self) -> Any:
        """Context in which the server is away: killed, and started again at the end."""
        return self.plane.outage()

    def _log_of(self, pod: str) -> Any:
        return self.logs(pod)

    def _clear(self) -> None:
        client = self.objects.client
        client.patch("namespaces", NAMESPACE, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": None}}})
        for _ in range(50):
            remaining = [(plural, body) for plural in CLEARED for body in client.list(plural, NAMESPACE)[0]]
            remaining = [(plural, body) for plural, body in remaining if body["metadata"]["name"] != "kube-root-ca.crt"]
            if not remaining:
                return
            for plural, body in remaining:
                try:
                    if body["metadata"].get("finalizers"):
                        client.patch(plural, body["metadata"]["name"], {"metadata": {"finalizers": None}}, NAMESPACE)
                    client.delete(plural, body["metadata"]["name"], NAMESPACE, gracePeriodSeconds=0)
                except StatusError as error:
                    if error.code not in (404, 409):
                        raise
            threading.Event().wait(0.1)
        raise AssertionError(f"{len(remaining)} objects do not go: {remaining[0]}")
