"""Last lines of a pod's output, across broken connections and after the pod is gone.

No line appears twice, and none is missing that the node still has. The lines are for people; no code parses them.
"""

import logging
import re
import threading
from collections import deque

from holdfast.launch.kubernetes.api_errors import TransientError
from holdfast.launch.kubernetes.client import LONGEST_LINE, Api, Lines, backoff
from holdfast.launch.local import TAIL_LINES
from holdfast.spec.errors import HoldfastError, MissingError

log = logging.getLogger("holdfast.launch")

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)$"
)  # of fixed width, as nodes print it


class LogFollower:
    """Thread that follows the log of one container, until `finish`, or until its end after `ended` is set."""

    def __init__(self, api: Api, pod: str, container: str) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = threading.Event()  # set by the caller when the container has ended
        self._api, self._pod, self._container = api, pod, container
        self._stamp = ""  # of the newest line, and the number of lines with it
        self._count = 0
        self._closing = threading.Event()
        self._lines: Lines | None = None
        self._thread = threading.Thread(target=self._follow, name=f"log {pod}", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the remaining lines, and close the connection."""
        self.ended.set()
        self._thread.join(seconds)
        self._closing.set()
        if (lines := self._lines) is not None:
            lines.close()

    def _follow(self) -> None:
        failures = 0
        while not self._closing.is_set():
            last = self.ended.is_set()  # tested before the read, so a last read has everything
            before = (self._stamp, self._count)
            try:
                self._read(follow=not last)
                if last:
                    return
                failures = 0 if (self._stamp, self._count) != before else failures + 1
            except (TransientError, MissingError) as error:  # the pod may not have started yet, or may be leaving
                failures += 1
                if last and (failures > 3 or isinstance(error, MissingError)):
                    return
                log.debug("the log of %s continues when it can: %s", self._pod, error)
            except HoldfastError as error:
                log.warning("the log of %s cannot be followed: %s", self._pod, error)
                return
            self.ended.wait(0.0 if last else min(5.0, backoff(failures)))

    def _read(self, *, follow: bool) -> None:
        """Read on from the end of the last read. The server accepts only whole seconds, so lines that were seen are
        skipped."""
        since = "".join(_STAMP.match(self._stamp).groups()) if self._stamp else None  # type: ignore[union-attr]
        tail = TAIL_LINES if since is None else None
        at_stamp, skip = self._stamp, self._count
        with self._api.log(self._pod, self._container, follow=follow, since=since, tail=tail) as lines:
            self._lines = lines
            for line in lines:
                stamp, _, text = line[:LONGEST_LINE].decode("utf-8", "replace").partition(" ")
                if stamp < at_stamp or not _STAMP.match(stamp):  # seen, or the node's message about a missing file
                    continue
                if stamp == at_stamp and skip:
                    skip -= 1
                    continue
                self._count = self._count + 1 if stamp == self._stamp else 1
                self._stamp = stamp
                text = text.rstrip("\r")
                self.tail.append(text)
        self._lines = None


def last_lines(api: Api, pod: str, container: str) -> list[str]:
    """The end of a pod's log; empty if the pod is gone."""
    try:
        with api.log(pod, container, follow=False, tail=TAIL_LINES) as lines:
            return text_lines(lines)
    except (TransientError, HoldfastError):
        return []


def text_lines(lines: Lines) -> list[str]:
    """Lines as the container printed them, without the time that the node puts before each."""
    return [line.decode("utf-8", "replace").partition(" ")[2] for line in lines]
