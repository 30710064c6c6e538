"""Caller's side of the child process that renders templates: one child for each process that needs one.

A template never costs the caller more than the limits of `limits`. A template that exceeds them is a TemplateLimitError
(code 11) that names it. The next request replaces a child that ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

from holdfast.rendering import limits
from holdfast.rendering.worker import DONE, LOAD, LONG, MEMORY, REFUSED, REPLY, REQUEST, RUN
from holdfast.spec.errors import DataError, ExitCode, HoldfastError

# All variables that the child gets: none is secret.
VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUTF8",
    "VIRTUAL_ENV",
)
MOST_TEMPLATES = 256  # that one child keeps


class TemplateLimitError(DataError):
    """A template uses more memory or CPU time, or writes more, than any honest one."""


class TemplateRefusedError(ValueError):
    """A template refuses its input, or is not a template."""


class RendererDiedError(HoldfastError):
    """The child process was killed from outside."""

    exit_code = ExitCode.KILLED


class Template:
    """A template that a child process renders. `name` identifies it in messages."""

    def __init__(self, name: str, kind: str, *arguments: Any) -> None:
        """`kind` and `arguments`: a program of `worker`, and its constructor's arguments."""
        self.name = name
        self._source = json.dumps([kind, *arguments])

    def run(self, request: str) -> Any:
        """The program's result for `request`. Raises TemplateRefusedError and TemplateLimitError."""
        payload = request.encode("utf-8", "surrogatepass")
        status, reply = _ask(self._source, payload, self.name)
        if status == DONE:
            return json.loads(reply.decode("utf-8", "surrogatepass"))
        if status == REFUSED:
            raise TemplateRefusedError(reply.decode())
        if status == MEMORY:
            usage = f"more than {limits.allowed_memory(len(payload)) / 2**20:,.0f} MiB of memory"
        else:
            usage = f"more than {limits.allowed_characters(len(payload)):,} characters"
        raise _exceeded(self.name, payload, usage)


def _exceeded(name: str, payload: bytes, spent: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"{name}: rendering a record of {len(payload):,} bytes takes {spent}; look for what repeats or pads text, or "
        "loops, in the template, and use another one"
    )


class _Renderer:
    """A child process, and the numbers of its loaded templates."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.numbers: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.rendering.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in VARIABLES if name in os.environ},
        )
        self.pid = self._process.pid
        self.end = weakref.finalize(self, _end, self._process, self.owner)
        if self._reply() is None:
            raise RuntimeError(f"the process that renders templates does not start (code {self._process.wait()})")

    def ask(self, source: str, payload: bytes, name: str) -> tuple[bytes, bytes]:
        """The status and payload of the reply. Raises TemplateLimitError and RendererDiedError."""
        number = self.numbers.get(source)
        if number is None:
            number = self.numbers[source] = len(self.numbers)
            self._send(LOAD, number, source.encode("utf-8", "surrogatepass"))
            if self._reply() is None:
                raise self._death(name, source.encode("utf-8", "surrogatepass"))
        self._send(RUN, number, payload)
        if (reply := self._reply()) is None:
            raise self._death(name, payload)
        return reply

    def _send(self, operation: bytes, number: int, payload: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply shows it
            seconds = limits.allowed_seconds(len(payload))
            self._process.stdin.write(REQUEST.pack(len(payload), number, seconds, operation) + payload)
            self._process.stdin.flush()

    def _reply(self) -> tuple[bytes, bytes] | None:
        """The reply; None if the process ended before it."""
        assert self._process.stdout is not None
        header = self._process.stdout.read(REPLY.size)
        if len(header) < REPLY.size:
            return None
        size, status = REPLY.unpack(header)
        payload = self._process.stdout.read(size)
        return (status, payload) if len(payload) == size else None

    def _death(self, name: str, payload: bytes) -> HoldfastError:
        """The error that explains a missing reply."""
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return _exceeded(name, payload, f"more than {limits.allowed_seconds(len(payload)):,.0f} s of CPU time")
        if code == -signal.SIGKILL:
            return RendererDiedError(
                f"{name}: the process that renders it was killed, most likely for want of memory; give the step more, "
                "then run the same command again"
            )
        return _exceeded(name, payload, f"what ends the process that does it (code {code})")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert stream is not None
            stream.close()


_lock = threading.RLock()
_current: list[_Renderer] = []


def _ask(source: str, payload: bytes, name: str) -> tuple[bytes, bytes]:
    """Send a request to this process's child, and start a child if there is none."""
    with _lock:
        if _current and (_current[0].owner != os.getpid() or len(_current[0].numbers) >= MOST_TEMPLATES):
            drop_renderer()
        if not _current:
            _current.append(_Renderer())
        try:
            status, reply = _current[0].ask(source, payload, name)
        except BaseException:
            drop_renderer()
            raise
        if status in (MEMORY, LONG):  # its memory may be fragmented
            drop_renderer()
        return status, reply


def drop_renderer() -> None:
    """End this process's child, if it has one; the next request starts another."""
    with _lock:
        if _current:
            _current.pop().end()


def renderer_pid() -> int | None:
    """The process id of this process's child; None without one."""
    return _current[0].pid if _current else None


def _forget() -> None:
    """Reset after a fork: the child has its parent's pipes, and possibly a lock that another thread held."""
    global _lock  # noqa: PLW0603 - one for each process
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget)
