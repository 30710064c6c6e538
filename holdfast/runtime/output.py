"""Standard output and standard error of a process: without secrets, and never the cause of a failure.

- A character that the terminal's encoding lacks is written as an escape.
- Closed streams are replaced by the null device.
- A reader that has closed its pipe is distinguished from every other broken pipe.
- Whole lines are redacted before they are written.

`logs` formats log records.
"""

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

from holdfast.runtime.secrets import StreamRedactor, redact
from holdfast.spec.redaction.patterns import MOST

CHUNK = 1 << 16  # bytes to read from a child process at a time
LONGEST_LINE = 1 << 20  # bytes of a line that a reader of a log holds
LOCK_SECONDS = 1.0  # a fork may have copied a locked lock


class _Wrapped:
    """Wrapper of a text stream, which handles everything that a subclass does not."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See TextIO."""
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See TextIO: each line goes through `write`."""
        for line in lines:
            self.write(line)


class _Redacted(_Wrapped):
    """Wrapper of a text stream that redacts its lines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._redactor, self._lock = StreamRedactor(), threading.RLock()

    def write(self, text: str) -> int:
        """See TextIO."""
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            self._stream.write(redact(text))
            return len(text)
        try:
            if ready := self._redactor.add(text):
                self._stream.write(ready)
        finally:
            self._lock.release()
        return len(text)

    def flush(self) -> None:
        """See TextIO. Also passes on an incomplete line."""
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                if rest := self._redactor.rest():
                    self._stream.write(rest)
            finally:
                self._lock.release()
        self._stream.flush()


@contextmanager
def redacted_output() -> Iterator[None]:
    """Redact secrets in what this process prints within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_redacted(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Redacted):
                stream.flush()
        sys.stdout, sys.stderr = before


def _redacted(stream: TextIO) -> TextIO:
    if stream is None or isinstance(stream, _Redacted):  # None: it was closed when the process started
        return stream
    return cast(TextIO, _Redacted(stream))


class _Copied(_Wrapped):
    """Wrapper of a text stream that also copies its lines to a log, without secrets."""

    def __init__(self, stream: TextIO, sink: Callable[[str], None]) -> None:
        super().__init__(stream)
        self._sink, self._pid = sink, os.getpid()
        self._redactor, self._lock = StreamRedactor(), threading.RLock()

    def write(self, text: str) -> int:
        """See TextIO."""
        self._stream.write(text)
        if os.getpid() == self._pid and self._lock.acquire(timeout=LOCK_SECONDS):  # a forked process has its own log
            try:
                self._sink(self._redactor.add(text))
            finally:
                self._lock.release()
        return len(text)

    def finish(self) -> None:
        """Pass on an incomplete line."""
        if rest := self._redactor.rest():
            self._sink(rest + "\n")


@contextmanager
def copied_output(sink: Callable[[str], None]) -> Iterator[None]:
    """Also send what Python prints in this process to `sink` within the context, in whole lines, without secrets."""
    before = sys.stdout, sys.stderr
    copies = [None if stream is None else _Copied(stream, sink) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, copy) for copy in copies)
    try:
        yield
    finally:
        for copy in filter(None, copies):
            copy.finish()
        sys.stdout, sys.stderr = before


def prepare_streams() -> None:
    """Open closed standard streams to the null device: otherwise the next file gets their number, and the printed text.
    Characters that an encoding lacks are written as escapes from now on."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name) == "0":  # rich would print nothing
            del os.environ[name]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class ReaderGoneError(Exception):
    """The reader of standard output is gone. Not an OSError, because libraries end the process at a broken pipe."""


class _Piped(_Wrapped):
    """Standard output, whose reader may leave."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.outlives = False  # whether the process continues without a reader

    def write(self, text: str) -> int:
        """See TextIO. Raises ReaderGoneError."""
        with self._reader_may_leave():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See TextIO. Raises ReaderGoneError."""
        with self._reader_may_leave():
            self._stream.flush()

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            with suppress(OSError, ValueError):  # the buffered rest goes there, too
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if not self.outlives:
                raise ReaderGoneError from None


def watch_reader() -> None:
    """Raise ReaderGoneError from now on when the reader of standard output is gone."""
    if not isinstance(sys.stdout, _Piped):
        sys.stdout = cast(TextIO, _Piped(sys.stdout))


def outlive_reader() -> None:
    """Continue from now on when the reader of standard output is gone: output is dropped."""
    if isinstance(sys.stdout, _Piped):
        sys.stdout.outlives = True


_SEQUENCES = re.compile(  # terminal sequences: OSC and similar ones with their text, CSI, two characters
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,65536}(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]{0,256}[ -/]{0,256}[@-~]?"
    r"|\x1b[ -/]{0,16}[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Foreign text for a terminal, without sequences that move its cursor, set its clipboard or reverse its text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))


class LineCutter:
    """The lines of bytes that arrive in pieces. It holds at most LONGEST_LINE bytes of a line.

    The end of a longer line is counted and dropped, and a mark shows how much. The cut is at a space if one is near, so
    that no half secret is left.
    """

    def __init__(self) -> None:
        self.size = 0  # bytes so far
        self._kept, self._cut = bytearray(), 0

    def add(self, data: bytes) -> Iterator[bytes]:
        """Add bytes. Returns the lines that they complete, without their ends."""
        self.size += len(data)
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._keep(part)
            yield self._take()
        self._keep(rest)

    def rest(self) -> Iterator[bytes]:
        """The last line, if it has no end."""
        if self._kept:
            yield self._take()

    def _keep(self, part: bytes) -> None:
        room = LONGEST_LINE - len(self._kept)
        self._kept += part[:room]
        self._cut += max(0, len(part) - room)

    def _take(self) -> bytes:
        line = bytes(self._kept)
        if self._cut:
            end = line.rfind(b" ", len(line) - MOST)
            end = end if end > 0 else len(line)
            line = line[:end] + b" [holdfast: %d bytes of this line were cut here]" % (self._cut + len(line) - end)
        self._kept.clear()
        self._cut = 0
        return line


def redacted_pieces(output: IO[str]) -> Iterator[str]:
    """What a process prints, without secrets: whole lines, and a line of more than CHUNK characters in pieces."""
    redactor = StreamRedactor()
    while line := output.readline(CHUNK):
        if text := redactor.add(line):
            yield text
    if rest := redactor.rest():
        yield rest


def printed_by(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The output of a process as it arrives, in whole lines and without secrets. Longer lines than LONGEST_LINE are
    cut."""
    assert process.stdout is not None
    redactor, cutter = StreamRedactor(), LineCutter()

    def redacted(lines: Iterable[bytes]) -> str:
        return redactor.line(b"".join(line + b"\n" for line in lines).decode(errors="replace"))

    while block := os.read(process.stdout.fileno(), CHUNK):
        if text := redacted(cutter.add(block)):
            yield text
    if text := redacted(cutter.rest()):
        yield text


def end_of_file(path: Path, lines: int) -> list[str]:
    """The last lines of a text file, at most LONGEST_LINE bytes of it."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
        return file.read(LONGEST_LINE).decode(errors="replace").splitlines()[-lines:]
