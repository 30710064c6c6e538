"""One node of a launch over ssh: `python -m holdfast.launch.ssh.node TOKEN`, started by sshd on each machine.

It greets with TOKEN, tells a free port and the version of Holdfast, and waits for its job: one line of JSON with the
arguments of Python and the environment of torchrun. Secrets therefore appear in no command line. Then each line is a
sign of life, and `stop` tells the ranks to save and leave. Without a line for a minute, or at the end of the input, the
ranks are killed: no rank trains without its launcher.

Its standard output is frames: what the ranks print, events, the exit report. A frame is a kind of one byte, the length
of its content (4 bytes, big endian), and the content. The first frame follows a line that a shell's start-up files
cannot print: GREETING and a token of the launcher.
"""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from holdfast.launch.exits import FILE_VARIABLE
from holdfast.launch.processes import PARENT_VARIABLE
from holdfast.runtime.node import INTERFACE_VARIABLE, free_port, interface_of
from holdfast.runtime.output import CHUNK
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import ExitCode
from holdfast.spec.json_parsing import parse_json_object
from holdfast.telemetry.channel import MAX_LINE, PIPE

STOP = b"stop"
LONGEST_JOB = 1 << 20  # bytes
GREETING = b"holdfast node "
READY, OUTPUT, EVENT, REPORT = b"r", b"o", b"e", b"x"  # kinds of frames
LONGEST_FRAME = 1 << 20  # bytes
LONGEST_NOISE = 1 << 16  # bytes that start-up files may print before the greeting
HEARTBEAT_SECONDS = 5.0  # between two lines of the launcher
SILENCE_SECONDS = 60.0  # without a line of the launcher, after which a node ends its ranks
_HEADER = struct.Struct(">cI")


class FrameWriter:
    """Writes frames to a stream, from any thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def greet(self, token: str) -> None:
        """Write the greeting, before any frame."""
        self._stream.write(GREETING + token.encode() + b"\n")
        self._stream.flush()

    def write(self, kind: bytes, content: bytes) -> None:
        """Write one frame. Raises OSError if no process reads any more, and ValueError for more than LONGEST_FRAME."""
        if len(content) > LONGEST_FRAME:
            raise ValueError(f"a frame of {len(content)} bytes is longer than {LONGEST_FRAME}")
        with self._lock:
            self._stream.write(_HEADER.pack(kind, len(content)) + content)
            self._stream.flush()


def frames_of(stream: IO[bytes], token: str) -> Iterator[tuple[bytes, bytes]]:
    """The frames of a stream, after its greeting. Ends at the end of the stream, also within a frame. Raises
    ValueError for a frame that is too long, and if the greeting does not come."""
    noise, greeting = 0, GREETING + token.encode() + b"\n"
    while (line := stream.readline(LONGEST_NOISE)) and not line.endswith(greeting):
        if (noise := noise + len(line)) > LONGEST_NOISE:
            raise ValueError(f"{noise} bytes came before the node's greeting")
    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        if length > LONGEST_FRAME:
            raise ValueError(f"a frame of {length} bytes is longer than {LONGEST_FRAME}")
        if len(content := stream.read(length)) < length:
            return
        yield kind, content


class _Input:
    """Standard input, line by line, with a limit for the time without one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def line(self, seconds: float) -> bytes | None:
        """The next line without its end; None at the end of the input, and after `seconds` without a line."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
                return None
            data = os.read(self._descriptor, CHUNK)
            if not data or len(self._rest) > LONGEST_JOB:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def main(argv: Sequence[str]) -> int:
    """Run one node. Returns torchrun's exit code, or LOST_PEER without a job."""
    lines = _Input(sys.stdin.fileno())
    frames = FrameWriter(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between frames
    frames.greet(argv[0])
    ready = {"port": free_port(), "version": version("holdfast")}
    frames.write(READY, json.dumps(ready).encode())
    text: bytes | None = b""
    while text == b"":  # a sign of life
        text = lines.line(SILENCE_SECONDS)
    if text is None:
        return ExitCode.LOST_PEER
    job = parse_json_object(text, "the job of this node")
    with temporary_folder("node") as name:
        variables = {**_network(job["address"]), **job["environment"]}
        return _run(job["arguments"], variables, Path(name), lines, frames)


def _network(address: str) -> dict[str, str]:
    """The variable that names the interface of `address`, else the one that the connection came through: Gloo would
    take that of this machine's host name, which others may not reach."""
    words = os.environ.get("SSH_CONNECTION", "").split()  # the client's address and port, and this machine's
    wanted = address or (words[2] if len(words) == 4 else "")
    name = interface_of(wanted) if INTERFACE_VARIABLE not in os.environ else None
    return {INTERFACE_VARIABLE: name} if name else {}


def _run(
    arguments: Sequence[str], variables: Mapping[str, str], folder: Path, lines: _Input, frames: FrameWriter
) -> int:
    report, events = folder / "ending.json", folder / "events"
    report.touch()
    os.mkfifo(events)
    pipe = os.open(events, os.O_RDWR)  # also open for writing, so that it has no end
    environment: dict[str, str] = {
        **os.environ,
        **variables,
        FILE_VARIABLE: str(report),
        PIPE: str(events),
        PARENT_VARIABLE: str(os.getpid()),
    }
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    for body in (lambda: _obey(lines, process), lambda: _forward_events(pipe, frames)):
        threading.Thread(target=body, daemon=True).start()
    assert process.stdout is not None
    try:
        while data := os.read(process.stdout.fileno(), CHUNK):
            frames.write(OUTPUT, data)
    except OSError:  # the launcher is gone
        _kill(process)
    code = process.wait()
    with suppress(OSError):
        frames.write(REPORT, report.read_bytes())
    return 128 - code if code < 0 else code


def _obey(lines: _Input, process: subprocess.Popen[Any]) -> None:
    """Follow the launcher's lines until it is gone."""
    while (line := lines.line(SILENCE_SECONDS)) is not None:
        if line == STOP and process.poll() is None:
            process.send_signal(signal.SIGTERM)
    _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kill torchrun; the kernel kills its ranks with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _forward_events(pipe: int, frames: FrameWriter) -> None:
    rest = b""
    with suppress(OSError):  # the launcher is gone
        while data := os.read(pipe, CHUNK):
            complete, _, rest = (rest + data).rpartition(b"\n")
            for line in complete.splitlines():
                if 0 < len(line) < MAX_LINE:
                    frames.write(EVENT, line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
