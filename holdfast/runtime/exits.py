"""Ends of a process and of its threads: exit codes of exceptions, shutdown requests with their listener, and a wait
for a thread that counts only this process's own time.

Where KFP's launcher runs a step, SIGTERM reaches the process group and ends the launcher. Argo's executor polls once a
second whether the launcher is gone, and then the container ends (docs/retries.md). So everything necessary happens in
the first tenths of a second. The exit handler does the cleanup.
"""

import errno
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.runtime.environment import home
from holdfast.runtime.logs import log
from holdfast.spec.errors import AccessDeniedError, ExitCode, HoldfastError, causes, missing_package

SLICE = 0.1  # seconds of one wait in `join_within`


def code_of(error: BaseException) -> ExitCode:
    """The exit code of a failure."""
    if isinstance(error, HoldfastError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ExitCode.NO_SPACE if full else ExitCode.UNEXPECTED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, torch's on an accelerator, torch's on a CPU (a plain RuntimeError), or
    the kernel's. A process that the kernel kills for memory reports nothing, but its launcher may know."""
    is_torch_oom = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)  # without importing torch
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    is_enomem = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_torch_oom or on_cpu or is_enomem


def explained(error: BaseException) -> BaseException:
    """An error with a remedy, if the exception is caused by a missing package, or by a home that this user may not
    use. Otherwise the exception itself."""
    return missing_package(error) or _denied_home(error) or error


def _denied_home(error: BaseException) -> AccessDeniedError | None:
    if isinstance(error, HoldfastError | KeyboardInterrupt):  # it says what it means
        return None
    try:
        root, here = home(), Path.cwd()
    except (HoldfastError, OSError):
        return None
    for cause in causes(error):
        if not isinstance(cause, OSError) or cause.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            continue
        path = here / cause.filename if isinstance(cause.filename, str) else None
        if path is not None and (path.is_relative_to(root) or root.is_relative_to(path)):
            return AccessDeniedError(
                f"{path}: {cause.strerror}; set HOLDFAST_HOME to a folder that this user may write to, then run the "
                "same command again. To share one folder, a group needs it with setgid, and its members need umask 002"
            )
    return None


def code_in(message: str) -> int | None:
    """The exit code in a cluster's message about a pod, such as Argo's `Error (exit code 10)`; None if it has none."""
    match = re.search(r"\bexit code:? (\d+)\b", message)
    return int(match[1]) if match else None


def exit_code_of(body: Callable[[], object]) -> ExitCode:
    """Run `body`. Log its failure to standard error, and return the exit code."""
    try:
        body()
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - every exception of a step becomes a code
        error = explained(raised)
        code = code_of(error)
        if isinstance(error, HoldfastError):
            log.error("%s", error)
        elif code == ExitCode.INTERRUPTED:
            log.error("interrupted")
        elif isinstance(error, OSError) and code == ExitCode.NO_SPACE:
            log.error("%s: no space left; free some, then run the same command again", error.filename or "disk")
        elif code == ExitCode.OUT_OF_MEMORY:
            log.error("out of memory: %s", next(iter(str(error).splitlines()), type(error).__name__))
        else:
            log.exception("unexpected failure: please report it with this traceback")
        return code
    except SystemExit as exited:  # nothing of Holdfast exits within a body, so it did not finish its work
        log.error("code of the run called sys.exit(%.100r); have it raise an exception, or return", exited.code)
        return ExitCode.USER_CODE
    return ExitCode.OK


class _ShutdownRequest:
    def __init__(self) -> None:
        self.requested = False
        self.queue: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put: it takes no lock


_request = _ShutdownRequest()


def shutdown_requested() -> bool:
    """Whether a shutdown was requested: then nothing starts again."""
    return _request.requested


def request_shutdown() -> None:
    """Record a shutdown request and wake the listener. For signal handlers and threads."""
    _request.requested = True
    _request.queue.put(True)


@contextmanager
def on_shutdown_request(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` once, in a separate thread, if a shutdown is requested within the context. Clears earlier
    requests: another step begins in this process."""
    global _request  # noqa: PLW0603 - a process works on one step at a time
    _request = request = _ShutdownRequest()

    def wait() -> None:
        if request.queue.get():
            listener()

    thread = threading.Thread(target=wait, name="leaving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        request.queue.put(False)


def join_within(thread: threading.Thread, seconds: float) -> None:
    """Wait at most `seconds` for a thread to end. Time counts only while this process gets CPU time: otherwise a
    process that was suspended meanwhile would not wait at all."""
    while seconds > 0.0 and thread.is_alive():
        thread.join(min(SLICE, seconds))
        seconds -= SLICE
