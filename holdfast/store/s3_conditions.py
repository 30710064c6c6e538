"""A test that a server honors conditional writes, on which the single ownership of a run rests.

Some servers ignore the conditions. Others honor them for one writer and lose them when several write concurrently. So
sixteen writers race for each kind of conditional write that a commit uses, and exactly one may win. The result is
remembered in the store, by the server's name and version, and in this process.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from holdfast.spec.errors import DataError, MissingError, StoreRefusedError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store.payload import views
from holdfast.store.s3_reads import Reads
from holdfast.store.s3_requests import PreconditionError
from holdfast.store.s3_writes import Write, Writes

WRITERS = 16
TOGETHER_SECONDS = 10.0  # how long the writers wait for each other
PROBES = ".holdfast/probes"
ANSWER = ".holdfast/conditional-writes.json"

Condition = Mapping[str, str]

_known: set[str] = set()  # servers that passed, of this process


class Conditions:
    """The conditional writes of one store."""

    def __init__(self, reads: Reads, writes: Writes, url: str, server: Callable[[], tuple[str, str]]) -> None:
        """`server` gives the server's address and its name."""
        self._reads, self._writes, self._url, self._server = reads, writes, url, server
        self._hold = False

    def require(self) -> None:
        """Refuse a server on which two writers could both win, before the first conditional write of this process.
        Raises StoreRefusedError."""
        if self._hold:
            return
        place, name = self._server()
        server = f"{place} {name}"
        if server not in _known and self._remembered() != name:
            self._race("put if absent (If-None-Match)", {"IfNoneMatch": "*"})
            self._race("replace if unchanged (If-Match)", None)
            self._writes.put_whole(_write(ANSWER, json.dumps({"server": name, "writers": WRITERS}).encode()))
        _known.add(server)
        self._hold = True

    def _remembered(self) -> str | None:
        """The name of the server when it passed."""
        try:
            answer = parse_json_object(self._reads.from_start("probe", ANSWER, 0)[0], ANSWER)
            return str(answer["server"])
        except (MissingError, DataError, KeyError):
            return None

    def _race(self, kind: str, condition: Condition | None) -> None:
        """Write one key sixteen times concurrently. `condition` of each; None: the object must be the previous one."""
        key = f"{PROBES}/{uuid.uuid4().hex}"
        before = None
        if condition is None:
            before = self._writes.put_whole(_write(key, b"before"))
            condition = {"IfMatch": before}
        start = threading.Barrier(WRITERS)

        def write(number: int) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait(TOGETHER_SECONDS)
            try:
                self._writes.put_whole(_write(key, b"writer %d" % number, condition))
            except PreconditionError:
                return False
            return True

        with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-probe") as pool:
            winners = sum(pool.map(write, range(WRITERS)))
        there = self._reads.head("probe", key)
        self._writes.delete([key])
        if winners == 0 and there is not None and there["ETag"] != before:
            winners = 1  # its reply was lost, but its write was applied
        if winners != 1:
            raise StoreRefusedError(
                f"{self._url}: this S3 does not hold conditional writes: of {WRITERS} writers that {kind} at once, "
                f"{winners} won instead of one, so two attempts could both own a run; upgrade the server, or name "
                "another store"
            )


def _write(key: str, content: bytes, condition: Condition | None = None) -> Write:
    return Write("probe", key, len(content), lambda *_: views(content), condition or {})
