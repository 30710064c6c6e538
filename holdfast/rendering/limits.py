"""Limits of a request to the child process, which grow with the size of the request.

Honest templates stay far below them: a template adds some kilobytes to a conversation.
"""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

MEMORY_BYTES = 512 * 2**20  # in addition to the child's memory before its first request
MEMORY_PER_BYTE = 32  # of the request
CPU_SECONDS = 5.0
BYTES_PER_SECOND = 4096  # of the request: each 4 KiB allow another second
TEXT_CHARACTERS = 16 * 2**20  # of one rendered text
CHARACTERS_PER_BYTE = 16  # of the request


class RefusedError(Exception):
    """A template or its environment refuses a record."""


class TooLongError(Exception):
    """A rendered text is out of all proportion to its record."""


def allowed_memory(size: int) -> int:
    """The bytes of memory that the child may use for a request of `size` bytes."""
    return MEMORY_BYTES + MEMORY_PER_BYTE * size


def allowed_seconds(size: int) -> float:
    """The CPU seconds for a request of `size` bytes."""
    return CPU_SECONDS + size / BYTES_PER_SECOND


def allowed_characters(size: int) -> int:
    """The characters of a text that is rendered for a request of `size` bytes."""
    return TEXT_CHARACTERS + CHARACTERS_PER_BYTE * size


_longest = [TEXT_CHARACTERS]  # of the current request


def require_length(text: str) -> str:
    """Returns `text`. Raises TooLongError if it is longer than the current request allows."""
    if len(text) > _longest[0]:
        raise TooLongError
    return text


class Limiter:
    """Sets the limits of this process for each request."""

    def __init__(self) -> None:
        self._base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        self._memory = 0
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    @contextlib.contextmanager
    def limited(self, size: int, seconds: float) -> Iterator[None]:
        """Limit the work on a request of `size` bytes. The kernel ends the process by SIGPROF after `seconds` of CPU
        time, regardless of what it does."""
        memory = self._base + allowed_memory(max(size, 2**20))
        if memory != self._memory:
            most = memory if self._hard == resource.RLIM_INFINITY else min(memory, self._hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, self._hard))
            self._memory = memory
        _longest[0] = allowed_characters(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
