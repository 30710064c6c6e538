"""Nodes: pods are real processes on 127.0.0.1, with their environment, output, grace and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster.api import Object, Objects, now


class Printed:
    """What a container printed, each line with the time, as nodes keep it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()

    def add(self, text: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        with self._changed:
            self._lines.append(f"{stamp} {text}")
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def snapshot(self) -> tuple[list[str], bool]:
        with self._changed:
            return list(self._lines), self._ended

    def wait(self, seen: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) > seen or self._ended, seconds)


class Kubelet:
    """Places pods on nodes and runs them. `program` may give a pod another command, or a status and no process."""

    def __init__(self, objects: Objects, folder: Path, nodes: tuple[str, ...]) -> None:
        self.nodes = nodes
        self.full = False  # no pod can be placed
        self.program: Callable[[Object], list[str] | Object | None] = lambda pod: None
        self.printed: dict[str, Printed] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._objects, self._folder = objects, folder
        self._known: set[str] = set()

    def reconcile(self) -> None:
        """Take in new pods, and end those that are to go."""
        for pod in self._objects.all("pods"):
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            if uid not in self._known:
                if pod["metadata"].get("deletionTimestamp"):
                    self._objects.remove("pods", name)
                elif not pod.get("spec", {}).get("containers"):
                    continue  # a launcher's pod: nothing runs in it
                elif (node := self._place(pod)) is None:
                    self._wait_for_place(name)
                else:
                    self._known.add(uid)
                    pod["spec"]["nodeName"] = node
                    threading.Thread(target=self._run, args=(pod,), daemon=True, name=f"pod {name}").start()

    def close(self) -> None:
        """Kill whatever runs."""
        for process in self.processes.values():
            _signal_group(process, signal.SIGKILL)

    def _place(self, pod: Object) -> str | None:
        terms = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
        required = terms.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
        avoided = {node for term in required for rule in term["matchExpressions"] for node in rule["values"]}
        free = [node for node in self.nodes if node not in avoided]
        if self.full or not free:
            return None
        taken = [other.get("spec", {}).get("nodeName") for other in self._objects.all("pods")]
        node = min(free, key=taken.count)
        self._objects.change("pods", pod["metadata"]["name"], lambda found: found["spec"].update(nodeName=node))
        return node

    def _wait_for_place(self, name: str) -> None:
        message = f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient cpu."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.set_status(name, {"phase": "Pending", "conditions": [condition]})

    def set_status(self, name: str, status: Object, uid: str | None = None) -> None:
        """Write a pod's status."""
        self._objects.change("pods", name, lambda pod: pod.__setitem__("status", status), uid)

    def _run(self, pod: Object) -> None:
        name, uid, container = pod["metadata"]["name"], pod["metadata"]["uid"], pod["spec"]["containers"][0]
        program = self.program(pod)
        if isinstance(program, dict):
            self.set_status(name, program, uid)
            self._wait_for_end(name, uid)
            self._objects.remove("pods", name)
            return
        printed = self.printed[name] = Printed()
        process = self.processes[uid] = subprocess.Popen(
            program or self._command(container),
            env=self._environment(container, uid),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._say(name, uid, container["name"], "Running", {"running": {"startedAt": now()}})
        threading.Thread(target=self._end, args=(pod, process), daemon=True).start()
        assert process.stdout is not None
        for line in process.stdout:
            printed.add(line.rstrip("\n"))
        code = process.wait()
        _signal_group(process, signal.SIGKILL)  # a container ends as a whole
        printed.end()
        status = 128 - code if code < 0 else code
        phase = "Failed" if status else "Succeeded"
        message = (self._folder / uid / "termination-log").read_text()
        ended = {"exitCode": status, "reason": "Error" if status else "Completed", "message": message}
        state = {"terminated": ended}
        self._say(name, uid, container["name"], phase, state)
        self._wait_for_end(name, uid)
        found = self._objects.get("pods", name)
        if found is not None and found["metadata"]["uid"] == uid:
            self._objects.remove("pods", name)

    def _say(self, name: str, uid: str, container: str, phase: str, state: Object) -> None:
        status = {"phase": phase, "containerStatuses": [{"name": container, "state": state}]}
        self.set_status(name, status, uid)

    def _wait_for_end(self, name: str, uid: str) -> None:
        """Wait until the pod is asked to go."""

        def asked() -> bool:
            found = self._objects.get("pods", name)
            return found is None or found["metadata"]["uid"] != uid or "deletionTimestamp" in found["metadata"]

        with self._objects.changed:
            self._objects.changed.wait_for(asked)

    def _end(self, pod: Object, process: subprocess.Popen[str]) -> None:
        self._wait_for_end(pod["metadata"]["name"], pod["metadata"]["uid"])
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(pod["spec"].get("terminationGracePeriodSeconds", 30))
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)

    def _command(self, container: Object) -> list[str]:
        first, *rest = container["command"]
        return [sys.executable if first == "python" else first, *rest]

    def _environment(self, container: Object, uid: str) -> dict[str, str]:
        """The container's variables, with the paths of its empty volumes, and a name service for one host."""
        root = self._folder / uid
        root.mkdir(parents=True)
        declared: dict[str, str] = {}
        for source in container.get("envFrom", []):
            declared |= self.secrets[source["secretRef"]["name"]]
        declared |= {entry["name"]: entry["value"] for entry in container.get("env", [])}
        (root / "termination-log").touch()
        mapped = {
            key: value.replace("/scratch", str(root)).replace("/dev/termination-log", str(root / "termination-log"))
            for key, value in declared.items()
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {
            "PATH": path,
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()),  # noqa: PTH109
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_LOCAL_ADDR": "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            **mapped,
        }


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
