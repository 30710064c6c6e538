"""Launcher over ssh: one connection to each machine, with one torchrun at its end.

The machines come from a file (`hosts`). All of them have Holdfast in a Python environment at the same path, and reach
the store. A machine that does not answer is replaced by another one of the file, if the file has one.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.launch.exits import NodeExit, parse_exit_report
from holdfast.launch.gang import gang_environment, gang_exit_of, torchrun_arguments
from holdfast.launch.interface import LEAVE_MARGIN, GangExit, Job
from holdfast.launch.local import only_one_here
from holdfast.launch.reporting import LaunchLog
from holdfast.launch.ssh.hosts import Host
from holdfast.launch.ssh.node import EVENT, HEARTBEAT_SECONDS, OUTPUT, READY, REPORT, STOP, frames_of
from holdfast.runtime.environment import make_folder
from holdfast.runtime.node import NODE_NAME
from holdfast.runtime.output import LineCutter, without_controls
from holdfast.runtime.secrets import StreamRedactor, for_ranks
from holdfast.spec.errors import ExitCode, MissingError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.telemetry.channel import append_line

log = logging.getLogger("holdfast.launch")

COMMAND = "HOLDFAST_SSH"  # the ssh command, such as `ssh -F FILE`
CONNECT_SECONDS = 60.0  # from the start of ssh to the greeting of the node
TAIL_LINES = 40
WAITING_LINES = 1024  # pieces of output that wait for the log; then the nodes wait
SSH_FAILED = 255  # ssh's own exit code
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
NODE = "holdfast.launch.ssh.node"
# Of this machine's environment, what the ranks need there. The rest belongs to this machine.
_PASSED = re.compile(
    r"(AWS|GOOGLE|AZURE|HF|NCCL|GLOO|TORCH|PYTORCH|OTEL|HOLDFAST)_\w+|(https?|no)_proxy", re.IGNORECASE
)
_OF_THIS_MACHINE = frozenset(
    """
    HOLDFAST_HOSTS HOLDFAST_SSH HOLDFAST_LAUNCHER HOLDFAST_BACKEND HOLDFAST_PARENT HOLDFAST_EVENTS HOLDFAST_OUTCOMES
    HOLDFAST_EXIT_REPORT HOLDFAST_RANK_EXITS AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE
    GOOGLE_APPLICATION_CREDENTIALS AZURE_FEDERATED_TOKEN_FILE AZURE_CONFIG_DIR
    """.split()
)

# What a node prints, in whole lines; None when it has ended.
_Output: TypeAlias = "queue.Queue[tuple[_Node, str | None]]"


def ssh_command() -> list[str]:
    """The command that connects to a machine: `ssh`, or the one that HOLDFAST_SSH names."""
    return shlex.split(os.environ.get(COMMAND, "ssh"))


class SshLauncher:
    """Launcher on the machine of the command, which need not be one of the machines that train."""

    def __init__(self, logs: Path, hosts: Sequence[Host]) -> None:
        """`logs`: folder for the ranks' output, on this machine; `hosts`: the machines, in the order of preference."""
        self._logs, self._hosts = logs, tuple(hosts)
        self._nodes: list[_Node] = []
        self._stop_requested = threading.Event()
        self._grace = 0.0

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. Holds this machine's lock of the run. An attempt fences that of another machine."""
        with only_one_here(run_id):
            yield

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. Always False: nodes end with the connection to their launcher."""
        return False

    def run(self, job: Job) -> GangExit:
        """See Launcher. Raises MissingError if a machine has no Holdfast or another version of it."""
        if self._stop_requested.is_set():
            return GangExit(ExitCode.TERMINATED, (), "stopped before the launch")
        self._grace = job.grace_seconds
        make_folder(self._logs)
        path = self._logs / f"launch-{job.launch:06d}.log"
        output: _Output = queue.Queue(WAITING_LINES)
        nodes = self._connect(job, output)
        try:
            if self._stop_requested.is_set():
                return GangExit(ExitCode.TERMINATED, (), "stopped before the launch")
            if len(nodes) < job.cluster.nodes.min:
                reason = f"{len(nodes)} machines answered, and cluster.nodes.min is {job.cluster.nodes.min}"
                return GangExit(ExitCode.RENDEZVOUS_TIMEOUT, (), reason, elsewhere=True)
            self._start(job, nodes)
            self._nodes = nodes
            if self._stop_requested.is_set():  # stopped in between
                self.stop()
            tail = self._follow(nodes, output, path)
        finally:
            _close(nodes)
        reports = {node.host.name: node.report for node in nodes}
        code = ExitCode.KILLED if any(node.code for node in nodes) else ExitCode.OK  # of a node without a report
        silent = [node for node in nodes if not node.report and node.last_error]
        silence = " ".join(f"{node.host.name}: {node.last_error}." for node in silent)
        return gang_exit_of(code, reports, tail, path, silence=silence, elsewhere=len(self._hosts) > len(nodes))

    def stop(self) -> None:
        """See Launcher."""
        self._stop_requested.set()
        for node in (nodes := self._nodes):
            node.send(STOP)
        timer = threading.Timer(self._grace + LEAVE_MARGIN, _close, (nodes,))
        timer.daemon = True
        timer.start()

    def _connect(self, job: Job, output: _Output) -> list[_Node]:
        """Connections to as many machines as the job takes, in the order of the file. Others replace machines that do
        not answer."""
        wanted = job.cluster.nodes.max
        usable = [host for host in self._hosts if host.name not in job.excluded_nodes]
        waiting = deque(sorted(usable, key=lambda host: host.name in job.leaving_nodes))
        nodes: list[_Node] = []
        while len(nodes) < wanted and waiting and not self._stop_requested.is_set():
            count = min(wanted - len(nodes), len(waiting))
            tried = [_Node(waiting.popleft(), output) for _ in range(count)]
            deadline = time.monotonic() + CONNECT_SECONDS
            try:
                for node in tried:
                    while not node.has_answered(HEARTBEAT_SECONDS) and time.monotonic() < deadline:
                        for each in (*nodes, *tried):  # those that have answered wait for their job
                            each.beat()
                    if node.is_ready():
                        nodes.append(node)
                    else:
                        log.warning("%s: no connection: %s", node.host.name, node.last_error or "no answer")
                        node.close()
            except BaseException:
                _close([*nodes, *tried])
                raise
        places = {host.name: place for place, host in enumerate(self._hosts)}
        return sorted(nodes, key=lambda node: places[node.host.name])

    def _start(self, job: Job, nodes: Sequence[_Node]) -> None:
        first = nodes[0]
        variables = {
            **{name: value for name, value in for_ranks(os.environ).items() if _is_passed(name)},
            **gang_environment(job, len(nodes), first.host.address or _host_name(first.host.name), first.port),
        }
        for number, node in enumerate(nodes):
            own = {**variables, "PET_NODE_RANK": str(number), NODE_NAME: node.host.name}
            order = {"arguments": torchrun_arguments(job), "environment": own, "address": node.host.address}
            node.send(json.dumps(order).encode())

    def _follow(self, nodes: Sequence[_Node], output: _Output, path: Path) -> tuple[str, ...]:
        """Write what the nodes print to `path` until all have ended. Returns the last lines."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        running, deadline = set(nodes), float("inf")
        with LaunchLog(path) as printed:
            while running:
                if time.monotonic() > deadline:
                    _close(nodes)
                    deadline = float("inf")
                with suppress(queue.Empty):
                    node, text = output.get(timeout=HEARTBEAT_SECONDS / 5)
                    if text is None:  # a node has ended: the rest have their grace period
                        running.discard(node)
                        deadline = min(deadline, time.monotonic() + self._grace + LEAVE_MARGIN)
                    else:
                        printed.write(text)
                        tail.extend(text.splitlines())
                for node in nodes:
                    node.beat()
        return tuple(tail)


class _Node:
    """A connection to one machine. A thread reads its frames."""

    def __init__(self, host: Host, output: _Output) -> None:
        self.host, self.code, self.port = host, 0, 0
        self.report: NodeExit | None = None
        self._output, self._token = output, secrets.token_hex(16)
        self._answered, self._sending, self._beaten = threading.Event(), threading.Lock(), time.monotonic()
        self._version = ""
        self.last_error = ""  # the last line that ssh or the node printed as an error
        remote = shlex.join([sys.executable, "-m", NODE, self._token])
        self._process = subprocess.Popen(
            [*ssh_command(), *OPTIONS, host.name, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the ranks only through `stop`
        )
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def has_answered(self, seconds: float) -> bool:
        """Whether the node has greeted or ended, after waiting at most `seconds`."""
        return self._answered.wait(seconds)

    def is_ready(self) -> bool:
        """Whether the node has greeted. Raises MissingError if Holdfast is not there, or is another version."""
        if self.port:
            if self._version != (here := version("holdfast")):
                raise MissingError(
                    f"{self.host.name}: has Holdfast {self._version}, and this machine {here}; install the same on all"
                )
            return True
        if self._answered.is_set() and self.code not in (0, SSH_FAILED):  # the machine answered, and Holdfast did not
            raise MissingError(
                f"{self.host.name}: {sys.executable} -m {NODE} ended with {self.code} ({self.last_error}); install "
                "Holdfast at the same path on all machines"
            )
        return False

    def send(self, line: bytes) -> None:
        """Send a line. A connection that is lost shows in the frames."""
        with self._sending, suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            self._beaten = time.monotonic()

    def beat(self) -> None:
        """Send a sign of life if one is due."""
        if time.monotonic() - self._beaten >= HEARTBEAT_SECONDS:
            self.send(b"")

    def close(self) -> None:
        """End the connection. The node then kills its ranks."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None
        redactor, cutter = StreamRedactor(), LineCutter()
        began = False
        try:
            for kind, content in frames_of(self._process.stdout, self._token):
                if kind == READY:
                    answer = parse_json_object(content, f"the greeting of {self.host.name}")
                    self.port, self._version = int(answer["port"]), str(answer["version"])
                    began = True
                    self._answered.set()
                elif kind == OUTPUT:
                    self._print(redactor, cutter.add(content))
                elif kind == EVENT:
                    append_line(content + b"\n")
                elif kind == REPORT:
                    self.report = parse_exit_report(content.decode("utf-8", "replace"))
        except Exception as error:  # noqa: BLE001 - what the other end sends can end this connection only
            self.last_error = str(error)
            self.close()
        self._print(redactor, cutter.rest())
        code = self._process.wait()
        self._errors.join(HEARTBEAT_SECONDS)
        self.code = 128 - code if code < 0 else code
        self._answered.set()
        if began:
            self._output.put((self, None))

    def _print(self, redactor: StreamRedactor, lines: Iterator[bytes]) -> None:
        if text := redactor.line(b"".join(line + b"\n" for line in lines).decode("utf-8", "replace")):
            self._output.put((self, text))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        redactor, cutter = StreamRedactor(), LineCutter()
        while data := os.read(self._process.stderr.fileno(), 1 << 16):
            for line in cutter.add(data):
                if text := without_controls(redactor.line(line.decode("utf-8", "replace") + "\n")).strip():
                    self.last_error = text[:500]
                    log.debug("%s: %s", self.host.name, text)


def _close(nodes: Sequence[_Node]) -> None:
    for node in nodes:
        node.close()


def _is_passed(name: str) -> bool:
    return bool(_PASSED.fullmatch(name)) and name not in _OF_THIS_MACHINE


def _host_name(name: str) -> str:
    """The host name that the ssh configuration has for a machine."""
    command = [*ssh_command(), "-G", name]
    process: subprocess.CompletedProcess[Any] = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"^hostname (\S+)$", str(process.stdout), re.MULTILINE)
    return match[1] if match else name.rpartition("@")[2]
