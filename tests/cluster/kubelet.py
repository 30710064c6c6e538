"""Nodes: they accept pods, run them as real processes, and report their status. A node can be lost with its pods."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests import warm
from tests.cluster import container as containers
from tests.cluster.container import MissingReferenceError, Printed, signal_group
from tests.cluster.objects import NAMESPACE, Object, Objects, now
from tests.cluster.remote import ServerObjects

NOT_RUN = "no-scheduler"  # scheduler name of pods whose work the test itself does
MASTER_WAIT_SECONDS = 200.0  # the operator's init container: 100 tries, one every two seconds


class Kubelet:
    """Places pods on nodes and runs them. `program` may give a pod another command, or a status and no process."""

    def __init__(self, objects: Objects | ServerObjects, folder: Path, nodes: tuple[str, ...]) -> None:
        self.nodes = nodes
        self.full = False  # no pod can be placed
        self.room = 100  # pods for each node
        self.unbound: set[str] = set()  # claims without a volume
        self.unpullable: set[str] = set()  # images that cannot be pulled
        self.master_wait = MASTER_WAIT_SECONDS
        self.program: Callable[[Object], list[str] | Object | None] = lambda pod: None
        self.printed: dict[str, Printed] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.variables: dict[str, dict[str, str]] = {}  # of ConfigMaps and Secrets, by name
        self._objects, self._folder = objects, folder
        self._known: set[str] = set()
        self._lost: set[str] = set()  # nodes

    def reconcile(self) -> None:
        """Start new pods, and end those that are being deleted."""
        for pod in self._objects.all("pods"):
            metadata, spec = pod["metadata"], pod.get("spec", {})
            if metadata["uid"] in self._known:
                continue
            if metadata.get("deletionTimestamp"):
                self._remove(pod)
            elif not spec.get("containers") or spec.get("schedulerName") == NOT_RUN:
                continue
            elif (node := self._place(pod)) is not None:
                self._known.add(metadata["uid"])
                pod["spec"]["nodeName"] = node
                thread = threading.Thread(target=self._run, args=(pod,), daemon=True, name=f"pod {metadata['name']}")
                thread.start()

    def close(self) -> None:
        """Kill all running pods."""
        for process in self.processes.values():
            signal_group(process, signal.SIGKILL)

    def lose(self, node: str) -> None:
        """Lose a node with all its pods and remove it from the cluster; the pods' garbage collector reports it."""
        self._lost.add(node)
        message = "PodGC: node no longer exists"
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": message}
        for pod in self._objects.all("pods"):
            if pod.get("spec", {}).get("nodeName") != node or pod["metadata"]["uid"] not in self._known:
                continue
            if (process := self.processes.get(pod["metadata"]["uid"])) is not None:
                signal_group(process, signal.SIGKILL)
            self.set_status(
                pod["metadata"]["name"],
                {**pod["status"], "phase": "Failed", "conditions": [condition]},
                pod["metadata"]["uid"],
                pod["metadata"]["namespace"],
            )
            self._remove(pod)

    def bring_back(self, node: str) -> None:
        """Let a lost node, or one of its name, join the cluster."""
        self._lost.discard(node)
        self._poke()

    def set_status(self, name: str, status: Object, uid: str | None = None, namespace: str = NAMESPACE) -> None:
        """Write a pod's status."""
        self._objects.change("pods", name, lambda pod: pod.__setitem__("status", status), uid, namespace)

    def _secret(self, pod: Object, name: str) -> Object | None:
        return self._objects.get("secrets", name, pod["metadata"]["namespace"])

    def _awaits(self, pod: Object, name: str) -> bool:
        """Wait until a Secret of that name exists, or the pod is gone. Returns whether the Secret exists."""
        metadata = pod["metadata"]

        def gone() -> bool:
            body = self._objects.get("pods", metadata["name"], metadata["namespace"])
            return body is None or "deletionTimestamp" in body["metadata"]

        with self._objects.changed:
            self._objects.changed.wait_for(lambda: self._secret(pod, name) is not None or gone())
        return self._secret(pod, name) is not None

    def _poke(self) -> None:
        with self._objects.changed:
            self._objects.changed.notify_all()

    def _place(self, pod: Object) -> str | None:
        """The node of a pod; None when the pod must wait for one, which its status then says."""
        metadata, spec = pod["metadata"], pod["spec"]
        terms = spec.get("affinity", {}).get("nodeAffinity", {})
        required = terms.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
        avoided = {node for term in required for rule in term["matchExpressions"] for node in rule["values"]}
        node_names = [other.get("spec", {}).get("nodeName") for other in self._objects.all("pods")]
        free = [node for node in self.nodes if node not in avoided | self._lost and node_names.count(node) < self.room]
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in spec.get("volumes", []) if _claims(volume)}
        message = ""
        if claims & self.unbound:
            message = "pod has unbound immediate PersistentVolumeClaims"
        elif self.full or not free:
            message = f"{len(self.nodes)} Insufficient cpu."
        if message:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            condition["message"] = f"0/{len(self.nodes)} nodes are available: {message}"
            status = {"phase": "Pending", "conditions": [condition]}
            self.set_status(metadata["name"], status, metadata["uid"], metadata["namespace"])
            return None
        node = min(free, key=node_names.count)

        def bind(found: Object) -> None:
            found["spec"]["nodeName"] = node

        self._objects.change("pods", metadata["name"], bind, metadata["uid"], metadata["namespace"])
        return node

    def _run(self, pod: Object) -> None:
        uid, container = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        program = self.program(pod)
        if isinstance(program, dict):
            self.set_status(pod["metadata"]["name"], program, uid, pod["metadata"]["namespace"])
        elif not self._pull(pod) and self._initialized(pod):
            self._run_container(pod, container, program)
        self._wait_for_end(pod)
        self._remove(pod)

    def _run_container(self, pod: Object, container: Object, program: list[str] | None) -> None:
        uid = pod["metadata"]["uid"]
        root = self._folder / uid
        root.mkdir(parents=True, exist_ok=True)
        (root / "termination-log").touch()
        while True:  # retries, as a real kubelet does
            try:
                variables = containers.environment(pod, container, root, self.variables, partial(self._secret, pod))
                break
            except MissingReferenceError as error:
                self._say(pod, "Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
                if not str(error).startswith("secret ") or not self._awaits(pod, str(error).split('"')[1]):
                    return
        self._mount(pod, container, root)
        output = self.printed[pod["metadata"]["name"]] = Printed()
        process = self.processes[uid] = warm.popen(
            program or containers.command(container, root, variables),
            variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._say(pod, "Running", {"running": {"startedAt": now()}})
        memory_exceeded = threading.Event()
        threading.Thread(target=self._end, args=(pod, process), daemon=True).start()
        threading.Thread(
            target=containers.watch_memory, args=(process, container, memory_exceeded), daemon=True
        ).start()
        assert process.stdout is not None
        for line in process.stdout:
            output.add(line.rstrip("\n"))
        code = process.wait()
        signal_group(process, signal.SIGKILL)  # a container ends as a whole
        output.end()
        if pod["spec"]["nodeName"] in self._lost:
            return  # a lost node reports nothing
        status = 128 - code if code < 0 else code
        reason = "OOMKilled" if memory_exceeded.is_set() else "Error" if status else "Completed"
        message = (root / "termination-log").read_text()
        state = {"terminated": {"exitCode": status, "reason": reason, "message": message}}
        self._say(pod, "Failed" if status else "Succeeded", state)

    def _mount(self, pod: Object, container: Object, root: Path) -> None:
        """Write the ConfigMaps that are mounted below the scratch volume."""
        maps = {
            volume["name"]: volume["configMap"] for volume in pod["spec"].get("volumes", []) if "configMap" in volume
        }
        for mount in container.get("volumeMounts", []):
            if mount["name"] in maps and mount["mountPath"].startswith(containers.SCRATCH):
                configmap = self._objects.get("configmaps", maps[mount["name"]]["name"], pod["metadata"]["namespace"])
                assert configmap is not None
                folder = Path(mount["mountPath"].replace(containers.SCRATCH, str(root)))
                folder.mkdir(parents=True)
                for name, text in configmap["data"].items():
                    (folder / name).write_text(text)

    def _pull(self, pod: Object) -> bool:
        """Whether an image of the pod cannot be pulled, which its status then says."""
        for field in ("initContainers", "containers"):
            for container in pod["spec"].get(field) or []:
                if container.get("image") in self.unpullable:
                    message = f'Back-off pulling image "{container["image"]}": not found'
                    state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
                    self._say(pod, "Pending", state, field, container["name"])
                    return True
        return False

    def _initialized(self, pod: Object) -> bool:
        """Run the init containers: the operator's waits for the master's name. Returns whether they succeeded."""
        for container in pod["spec"].get("initContainers") or []:
            self._say(pod, "Pending", {"running": {"startedAt": now()}}, "initContainers", container["name"])
            if container["name"] == "init-pytorch" and not self._master_comes(pod):
                state = {"terminated": {"exitCode": 1, "reason": "Error"}}
                self._say(pod, "Failed", state, "initContainers", container["name"])
                return False
        return True

    def _master_comes(self, pod: Object) -> bool:
        master, namespace = (
            f"{pod['metadata']['name'].rpartition('-worker-')[0]}-master-0",
            pod["metadata"]["namespace"],
        )

        def there() -> bool:
            master_pod = self._objects.get("pods", master, namespace) or {}
            pod_body = self._objects.get("pods", pod["metadata"]["name"], namespace) or {
                "metadata": {"deletionTimestamp": 1}
            }
            return master_pod.get("status", {}).get("phase") == "Running" or "deletionTimestamp" in pod_body["metadata"]

        end = time.monotonic() + self.master_wait
        with self._objects.changed:
            return self._objects.changed.wait_for(there, max(0.0, end - time.monotonic()))

    def _say(self, pod: Object, phase: str, state: Object, field: str = "containers", name: str = "") -> None:
        """Write the status of a pod in which one container is in `state` and the rest wait."""
        spec, metadata = pod["spec"], pod["metadata"]
        name = name or spec["containers"][0]["name"]
        status: Object = {"phase": phase, "hostIP": "127.0.0.1", "podIP": "127.0.0.1"}
        for kind in ("initContainers", "containers"):
            waiting = (
                {"waiting": {"reason": "PodInitializing"}} if kind == "containers" else {"terminated": {"exitCode": 0}}
            )
            status[f"{kind.removesuffix('s')}Statuses"] = [
                {
                    "name": container["name"], "image": container.get("image", ""), "imageID": "", "restartCount": 0,
                    "ready": phase == "Running",
                    "state": state if (kind, container["name"]) == (field, name) else waiting,
                }
                for container in spec.get(kind) or []
            ]  # fmt: skip
        status["conditions"] = [{"type": "Ready", "status": str(phase == "Running")}]
        self.set_status(metadata["name"], status, metadata["uid"], metadata["namespace"])

    def _wait_for_end(self, pod: Object) -> None:
        """Wait until the pod is being deleted."""
        metadata = pod["metadata"]

        def has_changed() -> bool:
            body = self._objects.get("pods", metadata["name"], metadata["namespace"])
            return body is None or body["metadata"]["uid"] != metadata["uid"] or "deletionTimestamp" in body["metadata"]

        with self._objects.changed:
            self._objects.changed.wait_for(has_changed)

    def _remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        body = self._objects.get("pods", metadata["name"], metadata["namespace"])
        if body is not None and body["metadata"]["uid"] == metadata["uid"]:
            self._objects.remove("pods", metadata["name"], metadata["namespace"])

    def _end(self, pod: Object, process: subprocess.Popen[str]) -> None:
        self._wait_for_end(pod)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(pod["spec"].get("terminationGracePeriodSeconds", 30))
            except subprocess.TimeoutExpired:
                signal_group(process, signal.SIGKILL)


def _claims(volume: Object) -> bool:
    return "persistentVolumeClaim" in volume
