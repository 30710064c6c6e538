"""Logging of every Holdfast process: plain lines for people, JSON lines on a cluster."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from holdfast.runtime.secrets import redact
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object

log = logging.getLogger("holdfast")


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """The line, with its traceback, without secrets."""
        return redact(super().format(record))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """The record as one JSON object, without secrets."""
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def configure_logging() -> None:
    """Log to standard error: plain lines, or JSON lines if HOLDFAST_LOG=json (as on a cluster)."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("HOLDFAST_LOG") == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    level = os.environ.get("HOLDFAST_LOG_LEVEL") or "INFO"
    log.setLevel(logging.getLevelNamesMapping().get(level.upper(), logging.INFO))
    if level.upper() not in logging.getLevelNamesMapping():
        log.warning("HOLDFAST_LOG_LEVEL=%s is no level; write DEBUG, INFO or WARNING. INFO is used", level)


class _Sink(logging.Handler):
    """Passes each record on as a line of JSON."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        super().__init__()
        self._sink, self._pid = sink, os.getpid()
        self.setFormatter(_JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """See Handler."""
        if os.getpid() == self._pid:  # a forked process has its own log
            with suppress(Exception):  # the handler before this one reports a record that cannot be formatted
                self._sink(self.format(record) + "\n")


@contextmanager
def copied_records(sink: Callable[[str], None]) -> Iterator[None]:
    """Also send log records of this process to `sink` within the context, each as a line of JSON without secrets."""
    handler = _Sink(sink)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def plain(line: str) -> str:
    """A line of a step's log for people: the JSON that pods write, as a terminal would have shown it."""
    with suppress(DataError, ValueError, TypeError, KeyError, OverflowError, OSError):
        entry = parse_json_object(line, "line of a log") if line.startswith("{") else {}
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry["time"]))
        traceback = "\n" + entry["traceback"] if "traceback" in entry else ""
        return f"{timestamp} {entry['level']:<7} {entry['logger']}: {entry['message']}{traceback}"
    return line
