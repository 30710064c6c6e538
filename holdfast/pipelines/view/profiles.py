"""Wait for a requested profile, and the operations of its trace that took longest."""

import gzip
import io
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from holdfast.pipelines.view.terminal import SafeConsole
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store import Store, read_bounded
from holdfast.telemetry.event_log import StoreEvents
from holdfast.telemetry.events import AttemptBegan, LaunchBegan, LaunchEnded, ProfileSaved, WarningIssued

POLL_SECONDS = 1.0
SILENT_SECONDS = 900.0  # without events before giving up; first steps may compile
MOST_BYTES = 2**28  # of a trace that is read here; as Python objects it takes about ten times as much
ROWS = 20  # operations that are shown
ON_ACCELERATOR = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # categories of events in the trace
ON_PROCESSOR = frozenset({"cpu_op"})


def wait_for_trace(store: Store, run_id: str, begun: float, silent: float = SILENT_SECONDS) -> str:
    """The key of the first trace that is reported after `begun` (unix seconds).

    Raises MissingError when the run reports a failure or has ended. Also raises it after `silent` seconds without
    events, because then no process of the run may be left.
    """
    events = StoreEvents(store, run_id)
    last_event, ended = time.monotonic(), False
    while True:
        for event in events.new():
            last_event = time.monotonic()
            if isinstance(event, LaunchBegan | AttemptBegan):
                ended = False
            elif isinstance(event, LaunchEnded) and event.restart_in is None:
                ended = True
            if event.time < begun:
                continue
            if isinstance(event, ProfileSaved):
                return event.key
            if isinstance(event, WarningIssued) and "profile" in event.message:
                raise MissingError(event.message)
        if ended:
            raise MissingError(f"run {run_id} has ended without it; the request waits for its next launch")
        if time.monotonic() - last_event > silent:
            raise MissingError(
                f"run {run_id} has reported nothing for {silent:.0f} s; the request stays, and `holdfast show "
                f"{run_id[:8]}` says whether it still trains"
            )
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Operation:
    """An operation of a trace. Times are microseconds, summed over its calls."""

    name: str
    calls: int
    own: float  # without the operations that it calls
    total: float


def operations(trace: bytes, *kinds: frozenset[str]) -> list[list[Operation]]:
    """The operations in a compressed trace of torch's profiler, the longest own time first: a list for each set of
    categories.

    Raises DataError if it is damaged, or larger than MOST_BYTES.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(trace)) as stream:
            text = stream.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise DataError(
                f"a trace of more than {MOST_BYTES >> 20} MiB has no table; open it in https://ui.perfetto.dev"
            )
        events = parse_json_object(text, "the trace", finite=False)["traceEvents"]
        return [_sums_of(events, categories) for categories in kinds]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the trace is damaged: {error}") from None


def _sums_of(events: Iterable[Mapping[str, Any]], categories: frozenset[str]) -> list[Operation]:
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in categories and event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    sums: dict[str, list[float]] = {}
    for thread in threads.values():
        _add_times(thread, sums)
    found = [Operation(name, int(calls), own, total) for name, (calls, own, total) in sums.items()]
    return sorted(found, key=lambda operation: (-operation.own, operation.name))


def _add_times(events: Iterable[Mapping[str, Any]], sums: dict[str, list[float]]) -> None:
    """Add calls, own and total time by name. Events of one thread contain each other or are apart."""
    open_calls: list[tuple[float, list[float]]] = []  # end of each, and the sums of its name
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, seconds = float(event["ts"]), float(event["dur"])
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            open_calls[-1][1][1] -= seconds
        of_name = sums.setdefault(str(event["name"]), [0, 0.0, 0.0])
        for place, amount in enumerate((1, seconds, seconds)):
            of_name[place] += amount
        open_calls.append((start + seconds, of_name))


def print_operations(store: Store, key: str) -> None:
    """Print what took longest in the trace at `key`: on the accelerator, if it has any, and on the processor."""
    found = operations(read_bounded(store, key, MOST_BYTES), ON_ACCELERATOR, ON_PROCESSOR)
    for place, of_place in zip(("accelerator", "processor"), found, strict=True):
        if of_place:
            _print(place, of_place)


def _print(place: str, found: Sequence[Operation]) -> None:
    console, every = SafeConsole(), sum(operation.own for operation in found)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (f"on the {place}", "calls", "own time", "share", "with what it calls"):
        is_name = title.startswith("on")
        table.add_column(title, justify="left" if is_name else "right", overflow="fold")
    for operation in found[:ROWS]:
        times = (f"{operation.own / 1e3:,.2f} ms", f"{100 * operation.own / max(every, 1e-9):.1f} %")
        table.add_row(operation.name, f"{operation.calls:,}", *times, f"{operation.total / 1e3:,.2f} ms")
    console.print(table)
