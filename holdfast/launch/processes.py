"""Processes that die with their parent, and a server that forks them after it has imported their modules once.

Importing torch takes longer than a small gang needs to train; a fork takes milliseconds. A forked process equals a
spawned one: its own environment, title, session, standard streams, signals and exit status, and the same bits. So the
server is forked before anything can start a thread, and never touches an accelerator.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

PARENT_VARIABLE = "HOLDFAST_PARENT"  # the parent's process id: the kernel does not report a death before the request
PRELOAD_VARIABLE = "HOLDFAST_PRELOAD"  # modules of the user, with spaces between, to import before processes are forked
_PR_SET_PDEATHSIG = 1
_MESSAGE = 1 << 20  # bytes of a request: arguments and environment
_STATUS = struct.Struct("i")
# Not `-m`: the package imports this module first, and the interpreter warns about that.
_SERVE = f"from {__name__} import main; main()"
_ROOM = " " * 4096  # padding of the command line, which forked processes overwrite with their own
_FOR_CHILDREN = (signal.SIGINT, signal.SIGTERM)  # signals for the processes that the server started, not for itself


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent dies, if HOLDFAST_PARENT holds its process id."""
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with(int(parent), number)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent, given by its process id, dies or has died."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), number)


def lead_children() -> None:
    """Have the children of this process die with it, if it dies with its own parent."""
    if PARENT_VARIABLE in os.environ:
        os.environ[PARENT_VARIABLE] = str(os.getpid())


class WarmProcess:
    """A process that a WarmServer forked, with the part of `subprocess.Popen` that a supervisor needs. Several threads
    may wait for it. An exception from a signal handler meanwhile leaves no lock held."""

    def __init__(self, args: Sequence[str], status: socket.socket) -> None:
        self.args, self._status = args, status
        message = status.recv(_STATUS.size)
        if not message:
            raise BrokenPipeError("the server of warm processes was killed")
        self.pid: int = _STATUS.unpack(message)[0]
        self.returncode: int | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended, until `poll` or `wait` has returned the exit
        code."""
        return self._status.fileno()

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number if a signal killed it; None while it runs."""
        with suppress(TimeoutError):
            self._await(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait at most `timeout` seconds for the end. Returns the exit code. Raises subprocess.TimeoutExpired."""
        try:
            return self._await(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # another thread has just seen the end
                os.kill(self.pid, number)

    def _await(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._await_status(timeout)
            # Only now may the kernel reuse the process id. Other waiting threads still find the status in the socket.
            self._status.shutdown(socket.SHUT_RDWR)
        return self.returncode

    def _await_status(self, timeout: float | None) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError
        # Peek, so that an exception from a signal handler cannot lose the status.
        message = self._status.recv(_STATUS.size, socket.MSG_PEEK)
        # A killed server sends nothing, and its processes die with it.
        return int(_STATUS.unpack(message)[0]) if message else -signal.SIGKILL


class WarmServer:
    """Server that forks processes which run the `main()` of a module. They die with the server, and the server dies
    with the process that made it. Only `start` may be called from several threads."""

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._requests, self.pid = requests, pid
        requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)

    @classmethod
    def fork(cls, modules: Sequence[str]) -> Self:
        """Import `modules` in this process and fork the server. Raises RuntimeError if more than one thread runs by
        then: a lock that another thread holds during a fork stays locked in the child."""
        _import(modules)
        ours, theirs = _channel()
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception from a signal handler inside a fork hook is lost, and the signal with it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_CHILDREN)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            _leave_after(lambda: _Serving(theirs, parent).forever())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def spawn(cls, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Start a server from a process that has threads: a new interpreter imports `modules`, in `environment`, and
        serves. It dies with the thread that called this."""
        ours, theirs = _channel()
        with theirs:
            command = [sys.executable, "-c", _SERVE, str(theirs.fileno()), str(os.getpid()), *modules, _ROOM]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        process.returncode = 0  # `close` waits for it
        return cls(ours, process.pid)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        new_session: bool = True,
        stdin: int | None = None,
    ) -> WarmProcess:
        """Run `module`'s `main()` with `arguments` in exactly this environment. A standard stream without a descriptor
        is that of this process. Raises BrokenPipeError if the server was killed."""
        ours, theirs = socket.socketpair()
        request = [module, list(arguments), dict(environment), str(Path.cwd()), new_session]
        streams = [own if stream is None else stream for own, stream in enumerate((stdin, stdout, stderr))]
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno(), *streams])
        return WarmProcess([sys.executable, "-m", module, *arguments], ours)

    def close(self) -> None:
        """End the server and all processes that it started."""
        self._requests.close()
        os.waitpid(self.pid, 0)


class _Serving:
    """Server side: one thread that forks processes and reports their exit statuses."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        die_with(parent)
        self._requests, self._selector = requests, selectors.DefaultSelector()
        self._running: dict[int, socket.socket] = {}  # process id → socket for its status
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _FOR_CHILDREN:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_CHILDREN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        self._selector.register(requests, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        gc.freeze()  # for the forked processes too: a collection would copy every shared page

    def forever(self) -> None:
        """Serve until the maker closes its end or dies."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    if not self._fork():
                        return
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._tell()
                else:  # the maker has read the status, so the process id may be released
                    self._selector.unregister(key.fileobj)
                    os.waitpid(key.data, 0)
                    self._running.pop(key.data).close()

    def _tell(self) -> None:
        for pid, status in self._running.items():
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or status in self._selector.get_map():
                continue
            code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            with suppress(OSError):  # the maker no longer waits
                status.send(_STATUS.pack(code))
            self._selector.register(status, selectors.EVENT_READ, pid)

    def _fork(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._requests, _MESSAGE, 4)
        if not message:
            return False
        status = socket.socket(fileno=descriptors[0])
        *request, new_session = json.loads(message)
        leads, led = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_CHILDREN)  # until the child stops ignoring them
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            if new_session:
                os.setsid()
            os.close(leads)
            os.close(led)
            _leave_after(lambda: self._become(request, descriptors[1:], status, server))
        os.close(led)
        os.read(leads, 1)  # wait for setsid: a reader of the process id may signal its group
        os.close(leads)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_CHILDREN)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self._running[pid] = status
        with suppress(OSError):
            status.send(_STATUS.pack(pid))
        return True

    def _become(
        self,
        request: tuple[str, list[str], dict[str, str], str],
        streams: Sequence[int],
        status: socket.socket,
        server: int,
    ) -> None:
        module, arguments, environment, folder = request
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_CHILDREN)
        self._selector.close()
        for inherited in (self._requests, status, *self._running.values()):
            inherited.close()
        os.close(self._woken)
        os.close(self._wake)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        if PARENT_VARIABLE in environment:
            environment[PARENT_VARIABLE] = str(server)
        own = dict(sorted(environment.items(), key=lambda item: os.environ.get(item[0]) == item[1]))
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.orig_argv = [module, *arguments], [sys.executable, "-m", module, *arguments]
        _present(sys.orig_argv, own)
        sys.exit(importlib.import_module(module).main())


def _import(modules: Sequence[str]) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's; it would start threads during the import
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # pyarrow's, which `preload` may import
    for module in modules:
        importlib.import_module(module)
    for module in os.environ.get(PRELOAD_VARIABLE, "").split():
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - code of the user; its script names the cause again
            print(f"train.preload: {module} cannot be imported, and is left out: {error}", file=sys.stderr)  # noqa: T201
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        raise RuntimeError(f"{threads} threads run after the import of {', '.join(modules)}: nothing can be forked")


def _channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _present(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Overwrite this process's command line and environment in /proc, as far as they fit. People and tests find a rank
    by its name and RANK. Variables that differ from the server's come first."""
    _show([f"{name}={value}" for name, value in environment.items()], 47)
    _show(command, 45)


def _show(words: Sequence[str], first: int) -> None:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[first]), int(fields[first + 1])  # addresses in memory: proc_pid_stat(5)
    encoded = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, encoded.ljust(end - start, b"\0"), end - start)


def _leave_after(body: Callable[[], object]) -> NoReturn:
    """Run `body` and exit as the interpreter would, without returning into the forked code."""
    code: object = 0
    try:
        body()
    except SystemExit as error:
        code = error.code or 0
    except BaseException:  # noqa: BLE001 - the interpreter's own way out prints everything too
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> None:
    """Serve, for `WarmServer.spawn`."""
    descriptor, parent, *modules, _ = sys.argv[1:]
    die_with(int(parent))
    _import(modules)
    _Serving(socket.socket(fileno=int(descriptor)), int(parent)).forever()
