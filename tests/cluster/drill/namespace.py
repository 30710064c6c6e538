"""A namespace of a real cluster as a place for drills. It needs only the Kubernetes API. Launchers are plain pods of
the step's image, results are the last line of their logs, and faults are deletions."""

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Self

from holdfast.launch.kubernetes.configuration import load_configuration
from holdfast.pipelines.paths import with_absolute_paths
from holdfast.spec import dump_spec, load_spec
from holdfast.steps.runner import IMAGE
from tests.cluster.client import Client, path_of
from tests.cluster.drill.place import DrillError, Ended
from tests.cluster.objects import Object, StatusError

LISTED = ("pytorchjobs", "trainjobs", "trainingruntimes", "jobs", "leases", "pods", "configmaps", "secrets", "services")
NAME = "holdfast-drill"
LABELS = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "step-train"}
SCRATCH = "/scratch"
FOLDER = f"{SCRATCH}/drill"  # where the spec is mounted: below a writable volume
CORDON_SECONDS = 60.0
PREPROCESS_SECONDS = 1800.0


class NamespacePlace:
    """Real namespace for drills: see `Place`. Its own objects are called holdfast-drill. They are not listed, and
    are deleted at the end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._client = Client(load_configuration)
        self._namespace: str = arguments.namespace
        self._spec = with_absolute_paths(load_spec(arguments.spec, arguments.set))
        self._image: str = arguments.image or IMAGE
        self._account: str = arguments.account
        self._delete_nodes: bool = arguments.delete_nodes
        self._jobs = self._spec.cluster.namespace or self._namespace  # the namespace of the ranks
        self._cordoned: dict[str, float] = {}  # node -> end of its cordon
        self._random = random.Random(arguments.seed)
        self._dataset = ""
        self._salt = ""
        self._launchers = 0
        faults: dict[str, Callable[[], str]] = {
            "launcher killed": partial(self._end_launcher, 0),
            "launcher evicted": partial(self._end_launcher, None),
            "rank killed": partial(self._end_rank, 0),
            "pod deleted": partial(self._end_rank, None),
        }
        if arguments.nodes or arguments.delete_nodes:
            faults["node lost"] = self._lose_node
        for victim in arguments.victim:
            name, _, place = victim.partition("=")
            namespace, _, selector = place.partition("/")
            faults[f"{name} killed"] = partial(self._end_labelled, namespace, selector)
        for option in arguments.command:
            name, _, command = option.partition("=")
            faults[f"{name} killed"] = partial(run_command, command)
        self.faults: Mapping[str, Callable[[], str]] = faults

    def __enter__(self) -> Self:
        self._clear()
        body = {"metadata": {"name": NAME, "namespace": self._namespace}, "data": {"spec.yaml": dump_spec(self._spec)}}
        self._post("configmaps", body)
        self._start("preprocess", [])
        self._dataset = self._result("dataset_id", PREPROCESS_SECONDS)
        print(f"dataset {self._dataset}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        for node in list(self._cordoned):
            self._uncordon(node)
        self._clear()

    def listed(self) -> frozenset[str]:
        self._uncordon_in_time()
        objects = set()
        for namespace in {self._namespace, self._jobs}:
            for kind in LISTED:
                names = [lasting_name(item["metadata"]) for item in self._client.list(kind, namespace)[0]]
                objects |= {f"{namespace}/{kind}/{name}" for name in names if not name.startswith(NAME)}
        return frozenset(objects)

    def launch(self, salt: str) -> None:
        self._salt = salt
        inputs = ["--dataset-id", self._dataset, "--salt", salt]
        self._start("train", inputs)

    def ended(self) -> Ended | None:
        self._uncordon_in_time()
        pod = self._patiently(lambda: self._client.get("pods", self._launcher, self._namespace))
        if pod is None:
            return Ended(137, "its pod is gone")
        status = pod.get("status", {})
        if status.get("phase") not in ("Succeeded", "Failed"):
            return None
        state = _terminated(pod)
        if status["phase"] == "Failed" and not state:
            return Ended(137, f"{status.get('reason', '')} {status.get('message', '')}")
        code = int(state.get("exitCode", 137))
        return Ended(code, "" if code == 0 else "\n".join(self._printed()[-15:]))

    def training(self) -> bool:
        return bool(self._running())

    def digest(self) -> str:
        return self._result("state_digest", 60.0)

    @property
    def _launcher(self) -> str:
        return f"{NAME}-{self._launchers}"

    def _start(self, step: str, inputs: list[str]) -> None:
        """Start the pod of a step as a renderer would create it, without a pipeline."""
        if self._launchers:
            self._delete("pods", self._launcher, self._namespace, 0)
        self._launchers += 1
        cluster = self._spec.cluster
        fields = {"NAME": "metadata.name", "NAMESPACE": "metadata.namespace", "UID": "metadata.uid"}
        variables = [
            {"name": f"HOLDFAST_POD_{name}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ]
        plain = {
            "HOLDFAST_HOME": f"{SCRATCH}/holdfast",
            "HOME": SCRATCH,
            "HOLDFAST_LAUNCHER": "kubernetes",
            **cluster.environment,
        }
        variables += [{"name": name, "value": value} for name, value in plain.items()]
        references: list[Object] = []
        if cluster.settings:
            references.append({"configMapRef": {"name": cluster.settings, "optional": True}})
        references += [{"secretRef": {"name": name, "optional": True}} for name in cluster.secrets]
        resources = {"memory": "2Gi"}
        container = {
            "name": "main",
            "image": self._image,
            "command": ["python", "-m", f"holdfast.components.{step}", "--spec", f"{FOLDER}/spec.yaml", *inputs],
            "env": variables,
            "envFrom": references,
            "resources": {"requests": {"cpu": "250m", **resources}, "limits": resources},
            "securityContext": {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [
                {"name": "temporary", "mountPath": "/tmp"},
                {"name": "scratch", "mountPath": SCRATCH},
                {"name": "spec", "mountPath": FOLDER, "readOnly": True},
            ],
        }  # fmt: skip
        context = {
            "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
        spec: Object = {
            "containers": [container],
            "restartPolicy": "Never",
            "serviceAccountName": self._account,
            "securityContext": context,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": name} for name in cluster.pull_secrets],
            "volumes": [
                {"name": "temporary", "emptyDir": {}},
                {"name": "scratch", "emptyDir": {}},
                {"name": "spec", "configMap": {"name": NAME}},
            ],
        }
        labels = {**LABELS, "sidecar.istio.io/inject": "false"}
        metadata = {"name": self._launcher, "namespace": self._namespace, "labels": labels}
        self._post("pods", {"metadata": metadata, "spec": spec})

    def _result(self, field: str, seconds: float) -> str:
        """A field of the step's last output line. Raises DrillError when the step failed or took longer."""
        end = time.monotonic() + seconds
        while (result := self.ended()) is None:
            if time.monotonic() > end:
                raise DrillError(f"pod {self._launcher} has not ended after {seconds:.0f} s; kubectl describe pod")
            time.sleep(0.5)
        if result.code != 0:
            raise DrillError(f"pod {self._launcher} ended with {result.code}: {result.last_lines}")
        for line in reversed(self._printed()):
            with suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)[field])
        raise DrillError(f"pod {self._launcher} ended well and printed no {field}")

    def _printed(self) -> list[str]:
        path = path_of("pods", self._namespace, self._launcher, "log")
        text: str = self._patiently(lambda: self._client.text(path, tailLines="100"))
        return text.splitlines()

    def _running(self) -> list[Object]:
        selector = "app.kubernetes.io/component=train,holdfast/run-id"
        pods, _ = self._patiently(lambda: self._client.list("pods", self._jobs, labelSelector=selector))
        kept_pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in kept_pods if pod.get("status", {}).get("phase") == "Running"]

    def _end_launcher(self, grace: int | None) -> str:
        return self._launcher if self._delete("pods", self._launcher, self._namespace, grace) else ""

    def _end_rank(self, grace: int | None) -> str:
        pods = self._running()
        if not pods:
            return ""
        name = self._random.choice(pods)["metadata"]["name"]
        return str(name) if self._delete("pods", name, self._jobs, grace) else ""

    def _lose_node(self) -> str:
        nodes = sorted({pod["spec"]["nodeName"] for pod in self._running()})
        if not nodes:
            return ""
        node = self._random.choice(nodes)
        self._client.patch("nodes", node, {"spec": {"unschedulable": True}})
        self._cordoned[node] = time.monotonic() + CORDON_SECONDS
        for pod in self._running():
            if pod["spec"]["nodeName"] == node:
                self._delete("pods", pod["metadata"]["name"], self._jobs, 0)
        if self._delete_nodes:
            self._client.delete("nodes", node)
        return f"{node}, cordoned for {CORDON_SECONDS:.0f} s" + (", its object deleted" if self._delete_nodes else "")

    def _uncordon_in_time(self) -> None:
        for node, end in list(self._cordoned.items()):
            if time.monotonic() > end:
                self._uncordon(node)

    def _uncordon(self, node: str) -> None:
        del self._cordoned[node]
        try:
            self._client.patch("nodes", node, {"spec": {"unschedulable": None}})
        except StatusError as error:
            if error.code != 404:  # its kubelet has not registered it again
                raise
            print(f"node {node} has not come back: start its kubelet again", flush=True)

    def _end_labelled(self, namespace: str, selector: str) -> str:
        pods, _ = self._patiently(lambda: self._client.list("pods", namespace, labelSelector=selector))
        names = [pod["metadata"]["name"] for pod in pods]
        for name in names:
            self._delete("pods", name, namespace, 0)
        return ", ".join(names)

    def _delete(self, kind: str, name: str, namespace: str, grace: int | None) -> bool:
        """Delete an object, with that many seconds of grace or the object's default. Returns whether it existed."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        try:
            self._patiently(lambda: self._client.delete(kind, name, namespace, **options))
        except StatusError as error:
            if error.code == 404:
                return False
            raise
        return True

    def _post(self, kind: str, body: Object) -> None:
        kinds = {"pods": "Pod", "configmaps": "ConfigMap"}
        whole = {"apiVersion": "v1", "kind": kinds[kind], **body}
        path = f"/api/v1/namespaces/{self._namespace}/{kind}"
        self._patiently(lambda: self._client.request("POST", path, whole))

    def _clear(self) -> None:
        for kind in ("pods", "configmaps"):
            for item in self._client.list(kind, self._namespace)[0]:
                if item["metadata"]["name"].startswith(NAME):
                    self._delete(kind, item["metadata"]["name"], self._namespace, 0)
        while any(item["metadata"]["name"].startswith(NAME) for item in self._client.list("pods", self._namespace)[0]):
            time.sleep(0.2)

    def _patiently(self, ask):  # type: ignore[no-untyped-def]
        """Repeat a request while the API server is away, which the drill may have caused."""
        end = time.monotonic() + 300
        while True:
            try:
                return ask()
            except StatusError as error:
                if error.code not in (0, 429, 500, 502, 503, 504) or time.monotonic() > end:
                    raise
            time.sleep(1.0)


def lasting_name(metadata: Object) -> str:
    """The name by which an object is recognized: that of its ReplicaSet, which replaces a pod under another name."""
    owners = [
        ownerreference["name"]
        for ownerreference in metadata.get("ownerReferences", ())
        if ownerreference["kind"] == "ReplicaSet"
    ]
    return str(owners[0] if owners else metadata["name"])


def run_command(command: str) -> str:
    """Run a command in this machine's shell. Raises DrillError when it fails."""
    result = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DrillError(f"{command}: ended with {result.returncode}: {result.stdout}{result.stderr}")
    return command


def _terminated(pod: Object) -> Object:
    for status in pod["status"].get("containerStatuses") or []:
        terminated: Object = status.get("state", {}).get("terminated") or {}
        return terminated
    return {}
