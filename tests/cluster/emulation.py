"""The emulated cluster as a whole: API server, operator and nodes, and the launcher's way to it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from kubernetes.client import Configuration

from holdfast.components.launch.kubernetes.client import Api
from tests.cluster.api import NAMESPACE, ApiServer, Object
from tests.cluster.kubelet import Kubelet
from tests.cluster.operator import Operator


class Emulation:
    """`with Emulation(folder) as cluster`: a cluster with the training operator and three nodes."""

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ("node-a", "node-b", "node-c")) -> None:
        self.server = ApiServer()
        self.objects = self.server.objects
        self.kubelet = Kubelet(self.objects, folder, nodes)
        self.operator = Operator(self.objects)
        self.token = folder / "token"
        self.server.logs = self.kubelet.printed.get
        folder.mkdir(parents=True, exist_ok=True)
        self.token.write_text("token-1")
        self._closing = False
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._control, name="controllers", daemon=True)

    def __enter__(self) -> Self:
        self.server.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with self.objects.changed:
            self.objects.changed.notify_all()
        self._thread.join(10)
        self.kubelet.close()
        self.server.__exit__()

    def api(self, patience: float = 20.0) -> Api:
        """A client with the service account's token."""

        def configure() -> Configuration:
            configuration = Configuration(host=self.server.url)
            configuration.api_key["authorization"] = f"Bearer {self.token.read_text()}"
            return configuration

        return Api(configure, NAMESPACE, patience)

    def kubeconfig(self, path: Path) -> Path:
        """A kubeconfig for a launcher in another process."""
        path.write_text(
            f"""
apiVersion: v1
kind: Config
current-context: emulated
clusters: [{{name: emulated, cluster: {{server: "{self.server.url}"}}}}]
contexts: [{{name: emulated, context: {{cluster: emulated, user: launcher, namespace: {NAMESPACE}}}}}]
users: [{{name: launcher, user: {{token: "{self.token.read_text()}"}}}}]
"""
        )
        return path

    def start_workflow(self, name: str = "pipeline", pods: tuple[str, ...] = ("launcher-1", "launcher-2")) -> Object:
        """A pipeline run with the pods of its launchers."""
        spec = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": name}, "spec": {}}
        workflow = self.objects.create("workflows", {**spec, "status": {"phase": "Running"}})
        for pod in pods:
            metadata = {"name": pod, "labels": {"workflows.argoproj.io/workflow": name}}
            self.objects.create("pods", {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
        return workflow

    def jobs(self) -> list[str]:
        """The names of the jobs there are."""
        return [job["metadata"]["name"] for job in self.objects.all("pytorchjobs")]

    def _control(self) -> None:
        seen = -1
        while not self._closing:
            with self.objects.changed:
                self.objects.changed.wait_for(lambda: self.objects.version != seen or self._closing, 0.2)  # noqa: B023
                seen = self.objects.version
            self.operator.reconcile()
            self.operator.collect()
            self.kubelet.reconcile()
