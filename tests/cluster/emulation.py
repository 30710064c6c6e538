"""The emulated cluster: API server, operator and nodes, and the launcher's access to it. The API server runs in this
process, or is a real one under the same operator and nodes."""

import json
import threading
from pathlib import Path
from typing import Any, Self

from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import Api
from tests.cluster.admission import Admission, quota_status
from tests.cluster.api import ApiServer
from tests.cluster.kubelet import NOT_RUN, Kubelet
from tests.cluster.objects import NAMESPACE, Object
from tests.cluster.operator import Operator
from tests.cluster.real import RealServer
from tests.envtest.control_plane import LAUNCHER, ControlPlane


class Emulation:
    """`with Emulation(folder) as cluster`: a cluster with the training operator and three nodes. With `plane` that
    API server serves it and enforces its own admission; otherwise the one in this process does."""

    def __init__(
        self,
        folder: Path,
        nodes: tuple[str, ...] = ("node-a", "node-b", "node-c"),
        plane: ControlPlane | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        server = ApiServer() if plane is None else RealServer(plane, folder)
        if isinstance(server, ApiServer):
            server.objects.admit = Admission(server.objects)
        self.server: Any = server
        self.objects: Any = server.objects
        self.kubelet = Kubelet(server.objects, folder, nodes)
        self.operator = Operator(server.objects)
        self.plane = plane
        self.token = folder / "token"
        self.token.write_text("token-1" if plane is None else LAUNCHER)
        self.server.logs = self.kubelet.printed.get
        self._closing = False
        self._failure: Exception | None = None
        self.away = threading.Event()  # set while the operator is down
        self._thread = threading.Thread(target=self._control, name="controllers", daemon=True)

    def __enter__(self) -> Self:
        self.server.__enter__()
        for node in self.kubelet.nodes:
            self.server.add_node(node)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with self.objects.changed:
            self.objects.changed.notify_all()
        self._thread.join(300)
        self.kubelet.close()
        self.server.__exit__()
        if self._failure is not None:
            raise self._failure

    def api(self, patience: float = 20.0) -> Api:
        """A client with the service account's token."""

        def configure() -> Configuration:
            token = self.token.read_text()
            if self.plane is not None:
                return self.plane.configuration(token)
            configuration = Configuration(host=self.server.url)
            configuration.api_key["authorization"] = f"Bearer {token}"
            return configuration

        return Api(configure, NAMESPACE, patience)

    def kubeconfig(self, path: Path) -> Path:
        """A kubeconfig for a launcher in another process."""
        users = self.server.users()
        context = {"cluster": "emulated", "user": "launcher", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "emulated",
            "clusters": [{"name": "emulated", "cluster": users["cluster"]}],
            "contexts": [{"name": "emulated", "context": context}],
            "users": [{"name": "launcher", "user": {"token": self.token.read_text()}}],
        }
        path.write_text(json.dumps(config))
        return path

    def start_workflow(self, name: str = "pipeline", pods: tuple[str, ...] = ("launcher-1", "launcher-2")) -> Object:
        """Create a pipeline run with the pods of its launchers."""
        spec = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": name}, "spec": {}}
        workflow: Object = self.objects.create("workflows", {**spec, "status": {"phase": "Running"}})
        for pod in pods:
            metadata = {"name": pod, "labels": {"workflows.argoproj.io/workflow": name}}
            containers = [{"name": "main", "image": "holdfast"}]
            body = {"metadata": metadata, "spec": {"containers": containers, "schedulerName": NOT_RUN}}
            self.objects.create("pods", {**body, "status": {"phase": "Running"}})
        return workflow

    def label_namespace(self, labels: dict[str, str], namespace: str = NAMESPACE) -> None:
        """Label a namespace, for example with the level of pod security that it enforces."""
        if self.objects.get("namespaces", namespace) is None:
            self.objects.create("namespaces", {"metadata": {"name": namespace}})

        def label(found: Object) -> None:
            found["metadata"]["labels"] = {**found["metadata"].get("labels", {}), **labels}

        self.objects.change("namespaces", namespace, label)

    def set_quota(self, hard: dict[str, str], namespace: str = NAMESPACE) -> None:
        """Limit the total requests of the pods in a namespace."""
        metadata = {"name": "small", "namespace": namespace}
        quota = self.objects.create("resourcequotas", {"metadata": metadata, "spec": {"hard": hard}})
        self._count(quota)

    def jobs(self) -> list[str]:
        """The names of all jobs."""
        return [job["metadata"]["name"] for job in self.objects.all("pytorchjobs")]

    def _count(self, quota: Object) -> None:
        """Write the usage into a quota, as its controller does. A real server admits no pod before that."""
        status = quota_status(self.objects, quota)

        def write(found: Object) -> None:
            found["status"] = status

        metadata = quota["metadata"]
        if quota.get("status") != status:
            self.objects.change("resourcequotas", metadata["name"], write, metadata["uid"], metadata["namespace"])

    def _control(self) -> None:
        try:
            version = -1
            while not self._closing:
                with self.objects.changed:
                    self.objects.changed.wait_for(lambda: self.objects.version != version or self._closing, 0.2)  # noqa: B023
                    version = self.objects.version
                if not self.away.is_set():
                    self.operator.reconcile()
                self.operator.collect()
                for quota in self.objects.all("resourcequotas"):
                    self._count(quota)
                self.kubelet.reconcile()
        except Exception as error:  # noqa: BLE001 - raised when the cluster is closed
            self._failure = error
