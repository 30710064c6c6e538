"""What a launcher records: the log file of a launch, of bounded size, and what it waits for.

A line is in the file when `write` returns. A file that would exceed FULL_BYTES keeps its beginning and its end, with a
line between them that says how many bytes were cut. The file is then replaced: follow it by name (`tail -F`). The store
also has each rank's output, with a separate bound (`store.log_stream`).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from holdfast.telemetry import emit
from holdfast.telemetry.events import LaunchPending

log = logging.getLogger("holdfast.launch")

FULL_BYTES = 64 * 2**20  # size at which the file is cut
HEAD_BYTES, TAIL_BYTES = 8 * 2**20, 24 * 2**20  # bytes that are kept
NOTICE_BYTES = 100  # longest notice between them
AGAIN_SECONDS = 60.0  # between two records of a reason to wait that alternates with others
_CUT = re.compile(rb"^\[holdfast: (\d+) bytes of this log were cut here\]\n", re.MULTILINE)


class LaunchLog:
    """Appends to the file at `path`. Raises the errors of the file system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def __enter__(self) -> LaunchLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, text: str) -> None:
        """Append one or more lines."""
        data = memoryview(text.encode("utf-8", "replace"))
        while data:  # an unbuffered file may take only a part
            count = self._file.write(data)
            self._size += count
            data = data[count:]
        if self._size > FULL_BYTES:
            self._cut()

    def _cut(self) -> None:
        shorter = self._path.with_name(f".{self._path.name}.shorter")
        try:
            with self._path.open("rb") as old, shorter.open("wb") as new:
                beginning = old.read(HEAD_BYTES + NOTICE_BYTES)
                if notice := _CUT.search(beginning):
                    cut, start, head = int(notice[1]), notice.end(), beginning[: notice.start()]
                else:
                    head = beginning[: beginning.rfind(b"\n", 0, HEAD_BYTES) + 1] or beginning[:HEAD_BYTES]
                    cut, start = 0, len(head)
                old.seek(self._size - TAIL_BYTES)
                line = old.readline()  # the rest of a line
                if not old.peek(1):  # it was the only line
                    old.seek(-len(line), os.SEEK_CUR)
                cut += old.tell() - start
                line_end = b"" if head.endswith(b"\n") else b"\n"
                new.write(head + line_end + b"[holdfast: %d bytes of this log were cut here]\n" % cut)
                shutil.copyfileobj(old, new)
            shorter.replace(self._path)
        except BaseException:
            shorter.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()


class WaitReport:
    """Recorder of reasons to wait. A reason that alternates with others is recorded once a minute, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current = ""
        self._recorded: dict[str, tuple[float, int]] = {}  # its time, and how often the reason came back since

    def record(self, reason: str) -> None:
        """Record that the launcher now waits for this."""
        if reason == self._current:
            return
        self._current, now = reason, self._clock()
        self._recorded = {
            recorded: (moment, n)
            for recorded, (moment, n) in self._recorded.items()
            if n or now - moment < AGAIN_SECONDS
        }
        moment, count = self._recorded.get(reason, (now - AGAIN_SECONDS, 0))
        if now - moment < AGAIN_SECONDS:
            self._recorded[reason] = (moment, count + 1)
            return
        self._recorded[reason] = (now, 0)
        log.warning("waiting: %s", reason)
        emit(LaunchPending(reason=reason, count=count + 1))

    def end(self) -> None:
        """Note that the launcher no longer waits: the next reason is recorded immediately."""
        self._current = ""
        self._recorded.clear()
