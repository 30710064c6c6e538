"""What runs in a pod: a real process on 127.0.0.1 with its environment, its output and its memory limit."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
from kubernetes.utils.quantity import parse_quantity

from tests.cluster.objects import Object

SCRATCH = "/scratch"  # where pods of Holdfast have an empty volume
LOOK_SECONDS = 0.2  # between two checks of a container's memory


class Printed:
    """The output of a container, each line with its time, as nodes keep it."""

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


class MissingReferenceError(Exception):
    """A ConfigMap or Secret that a container takes its variables from is missing."""


def signal_group(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to all processes of a container."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def watch_memory(process: subprocess.Popen[str], container: Object, over: threading.Event) -> None:
    """Kill the whole container, and set `over`, when it has more memory than its limit. Returns when the process
    ends."""
    limit = (container.get("resources", {}).get("limits") or {}).get("memory")
    if limit is None:
        return
    most = int(parse_quantity(limit))
    while process.poll() is None:
        if _resident(process.pid, most) > most:
            over.set()
            signal_group(process, signal.SIGKILL)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)


def _resident(pid: int, most: int) -> int:
    """The bytes of a process and its children; shared memory counts once. Called only near the limit, since it is
    slow."""
    with suppress(psutil.Error):
        whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        if sum(_of(process, "rss") for process in whole) > most:
            return sum(_of(process, "pss") for process in whole)
    return 0


def _of(process: psutil.Process, field: str) -> int:
    try:
        return int(getattr(process.memory_full_info() if field == "pss" else process.memory_info(), field))
    except psutil.Error:
        return 0


def command(container: Object, root: Path, variables: Mapping[str, str]) -> list[str]:
    """The container's command, with its scratch volume at `root` and variables expanded as the kubelet does."""
    first, *rest = [expanded(argument, variables) for argument in (*container["command"], *container.get("args", []))]
    return [
        sys.executable if first == "python" else first,
        *(argument.replace(SCRATCH, str(root)) for argument in rest),
    ]


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word as the kubelet expands it (kubernetes/third_party/forked/golang/expansion). `$$` is a dollar; `$(NAME)`
    is the value of a variable, and stays where no variable has that name."""
    pattern = re.compile(r"\$(?:\$|\(([^)]*)\))")
    return pattern.sub(lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), word)


def environment(
    pod: Object,
    container: Object,
    root: Path,
    variables: Mapping[str, Mapping[str, str]],
    secret: Callable[[str], Object | None] = lambda name: None,
) -> dict[str, str]:
    """The container's variables, with the paths of its empty volumes, and a name service for one host.
    Raises MissingReferenceError."""
    declared: dict[str, str] = {}
    for source in container.get("envFrom", []):
        ((kind, reference),) = source.items()
        if reference["name"] not in variables and not reference.get("optional"):
            kind_name = {"configMapRef": "configmap", "secretRef": "secret"}[kind]
            raise MissingReferenceError(f'{kind_name} "{reference["name"]}" not found')
        declared |= variables.get(reference["name"], {})
    for entry in container.get("env", []):
        if (value := _value(entry, pod, variables, secret)) is not None:
            declared[entry["name"]] = value
    mapped = {
        key: value.replace(SCRATCH, str(root)).replace("/dev/termination-log", str(root / "termination-log"))
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


def _value(
    entry: Object, pod: Object, variables: Mapping[str, Mapping[str, str]], secret: Callable[[str], Object | None]
) -> str | None:
    """The value of a variable, which may be a field of the pod or an entry of a Secret. None for an optional
    variable that is missing."""
    if "value" in entry:
        return expanded(str(entry["value"]), {})
    if reference := entry["valueFrom"].get("secretKeyRef"):
        name, key, optional = reference["name"], reference["key"], reference.get("optional", False)
        secret_object = secret(name)
        data = variables.get(name) if secret_object is None else secret_object["stringData"]
        if data is None and not optional:
            raise MissingReferenceError(f'secret "{name}" not found')
        if key in (data or {}):
            return str((data or {})[key])
        if not optional:
            raise MissingReferenceError(f"couldn't find key {key} in Secret {pod['metadata']['namespace']}/{name}")
        return None
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return str(pod["metadata"]["labels"].get(label[1], ""))
    section, _, name = path.partition(".")
    return str(pod[section].get(name, ""))
