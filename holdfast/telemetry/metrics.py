"""Prometheus metrics of a run, from its events.

Rank 0 serves its own events, the launcher those of all processes, with goodput. A taken port or a missing library is
logged and does not affect training. Nothing is served unless it is enabled. The alert rules and the dashboard in
`manifests/components/monitoring` use these names and no others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from holdfast.spec.errors import ExitCode
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    HangDetected,
    LaunchEnded,
    Progress,
    SaveCommitted,
    SaveFailed,
    StragglerDetected,
    TimeSpent,
)
from holdfast.telemetry.ledger import CLASSES, Ledger, ledger

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

log = logging.getLogger("holdfast.telemetry")

# Figures of an accelerator's driver, by the name and in the unit of NVIDIA's DCGM: text, field of TimeSpent, factor.
ACCELERATORS: dict[str, tuple[str, str, float]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("How busy a rank's accelerator is, in percent.", "utilisation", 100),
    "DCGM_FI_DEV_POWER_USAGE": ("Its power, in watts.", "watts", 1),
    "DCGM_FI_DEV_FB_USED": ("Its memory that is used, by whomever, in MiB.", "memory_used", 2**-20),
    "DCGM_FI_DEV_FB_TOTAL": ("Its memory, in MiB.", "memory_total", 2**-20),
    "DCGM_FI_DEV_GPU_TEMP": ("Its temperature, in degrees Celsius.", "celsius", 1),
    "DCGM_FI_DEV_SM_CLOCK": ("Its clock, in MHz.", "sm_megahertz", 1),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("Why its clock is not higher, as bits of NVML.", "clock_reasons", 1),
}

# The exported metrics, each with its labels in addition to the run's.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "holdfast_step": ("Optimizer steps done.", ()),
    "holdfast_steps": ("Optimizer steps that the run will have.", ()),
    "holdfast_ranks": ("Ranks that train.", ()),
    "holdfast_attempt": ("Number of the attempt: gangs that have formed.", ()),
    "holdfast_step_seconds": ("Seconds of a step.", ()),
    "holdfast_phase_seconds": ("Seconds of a step on rank 0, by phase.", ("phase",)),
    "holdfast_tokens_per_second": ("Tokens that all ranks train on in a second.", ()),
    "holdfast_mfu_ratio": ("Model FLOPs utilisation, from 0 to 1; absent where the peak is not known.", ()),
    "holdfast_loss": ("Training loss, nats a token.", ()),
    "holdfast_grad_norm": ("Norm of the gradient, before clipping.", ()),
    "holdfast_learning_rate": ("Learning rate.", ()),
    "holdfast_peak_memory_bytes": (
        "The most memory that a rank has held, of its accelerator or its process.",
        ("rank",),
    ),
    "holdfast_checkpoint_step": ("Step of the newest checkpoint.", ()),
    "holdfast_checkpoint_lag_steps": ("Steps since the newest checkpoint.", ()),
    "holdfast_checkpoint_timestamp_seconds": ("When the newest checkpoint was committed, unix time.", ()),
    "holdfast_checkpoint_failures": ("Saves that failed.", ()),
    "holdfast_checkpoint_stall_seconds": ("Seconds that training has waited for saves.", ()),
    "holdfast_restarts": ("Launches that ended and were followed by another one.", ()),
    "holdfast_hangs": ("Hangs that a watchdog has named; of the launcher only.", ()),
    "holdfast_stragglers": ("Slow ranks that were named.", ()),
    "holdfast_last_event_timestamp_seconds": ("When the run last reported anything, unix time.", ()),
    "holdfast_rank_seconds": ("Rank-seconds by class of the goodput ledger; of the launcher only.", ("class",)),
    "holdfast_goodput_ratio": ("Share of all rank-seconds that was productive; of the launcher only.", ()),
} | {name: (text, ("rank",)) for name, (text, _, _) in ACCELERATORS.items()}
_COUNTED: dict[type, str] = {
    SaveFailed: "holdfast_checkpoint_failures",
    HangDetected: "holdfast_hangs",
    StragglerDetected: "holdfast_stragglers",
}
LEDGER_EVENTS = 200_000  # with more of them, goodput is not exported any more
LEDGER_SECONDS = 15.0  # interval between two updates of the ledger metrics
BIND_SECONDS = 60.0  # time for which another process may still hold a port
CLOSE_SECONDS = 5.0


class Metrics:
    """The metrics of one run. Pass every event to `take`; it is thread-safe."""

    def __init__(self, run_id: str, *, whole: bool = False) -> None:
        """`whole`: all events of the run are taken, and not those of one rank alone."""
        self.registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(name, text, ("run", *labels), registry=self.registry)
            for name, (text, labels) in METRICS.items()
        }
        self._run_id, self._whole = run_id, whole
        self._lock = threading.Lock()
        self._step = self._saved = 0
        self._counts: Counter[str] = Counter()
        self._exported: dict[int, set[str]] = {}  # names of ACCELERATORS that are set, by rank
        self._stalled = 0.0
        self._kept: list[Event] = []  # the events for the ledger
        self._full = False  # whether there were more than LEDGER_EVENTS
        self._looked = 0.0

    def take(self, event: Event, _line: bytes = b"") -> None:
        """Take an event of the run."""
        with self._lock:
            self._set("holdfast_last_event_timestamp_seconds", event.time)
            if isinstance(event, Progress):
                self._progress(event)
            elif isinstance(event, AttemptBegan):
                self._set("holdfast_ranks", event.world)
                self._set("holdfast_attempt", event.attempt or 0)
                self._set("holdfast_steps", event.steps)
                self._saved = event.step
                self._reached(event.step)
                self._forget_ranks(event.world)
            elif isinstance(event, SaveCommitted):
                self._saved, self._stalled = event.step, self._stalled + event.stall_seconds
                self._set("holdfast_checkpoint_step", event.step)
                self._set("holdfast_checkpoint_timestamp_seconds", event.time)
                self._set("holdfast_checkpoint_stall_seconds", self._stalled)
                self._reached(max(self._step, event.step))
            elif type(event) in _COUNTED:
                self._count(_COUNTED[type(event)])
            elif isinstance(event, TimeSpent):
                self._set("holdfast_peak_memory_bytes", event.peak_memory, rank=str(event.rank))
                self._accelerator(event)
            elif isinstance(event, LaunchEnded):
                self._forget_ranks(0)
                if event.restart_in is not None and event.code != ExitCode.OK:
                    self._count("holdfast_restarts")
            if self._whole and not isinstance(event, Progress) and not self._full:
                self._kept.append(event)
                if len(self._kept) > LEDGER_EVENTS:
                    log.info("more than %d events: goodput is no longer exported", LEDGER_EVENTS)
                    self._full = True
                    self._kept.clear()
                    for name in ("holdfast_goodput_ratio", "holdfast_rank_seconds"):
                        self._gauges[name].clear()

    def look(self, now: float | None = None) -> None:
        """Update the metrics that depend on time. Only where all events are taken."""
        with self._lock:
            now = time.time() if now is None else now
            if not self._kept or now - self._looked < LEDGER_SECONDS:
                return
            self._looked, events = now, list(self._kept)
        self._account(ledger(sorted(events, key=lambda event: event.time), now))

    def _account(self, account: Ledger) -> None:
        self._set("holdfast_goodput_ratio", account.goodput)
        for name in CLASSES:
            self._set("holdfast_rank_seconds", account.seconds.get(name, 0.0), **{"class": name})

    def _progress(self, event: Progress) -> None:
        self._set("holdfast_steps", event.steps)
        figures = {
            "holdfast_tokens_per_second": event.tokens_per_second,
            "holdfast_loss": event.loss,
            "holdfast_grad_norm": event.grad_norm,
            "holdfast_mfu_ratio": event.mfu,
            "holdfast_learning_rate": event.learning_rate,
            "holdfast_step_seconds": event.step_seconds,
        }
        for name, value in figures.items():
            if value is not None:
                self._set(name, value)
        for phase, seconds in event.phase_seconds.items():
            self._set("holdfast_phase_seconds", seconds, phase=phase)
        if event.peak_memory is not None:
            self._set("holdfast_peak_memory_bytes", event.peak_memory, rank="0")
        self._reached(event.step)

    def _accelerator(self, event: TimeSpent) -> None:
        figures = {name: (getattr(event, field), factor) for name, (_, field, factor) in ACCELERATORS.items()}
        values = {name: value * factor for name, (value, factor) in figures.items() if value is not None}
        self._forget(event.rank, self._exported.get(event.rank, set()) - values.keys())
        for name, value in values.items():
            self._set(name, value, rank=str(event.rank))
        self._exported[event.rank] = set(values)

    def _forget_ranks(self, world: int) -> None:
        """Remove the accelerator metrics of ranks from `world` on."""
        for rank in [rank for rank in self._exported if rank >= world]:
            self._forget(rank, self._exported.pop(rank))

    def _forget(self, rank: int, names: Iterable[str]) -> None:
        for name in names:
            self._gauges[name].remove(self._run_id, str(rank))

    def _reached(self, step: int) -> None:
        self._step = step
        self._set("holdfast_step", step)
        self._set("holdfast_checkpoint_lag_steps", max(0, step - self._saved))

    def _count(self, name: str) -> None:
        self._counts[name] += 1
        self._set(name, self._counts[name])

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name].labels(run=self._run_id, **labels).set(value)


class Server:
    """Metrics at http://host:port/metrics, from when the port is free until they are closed."""

    def __init__(self, metrics: Metrics, host: str, port: int, seconds: float = BIND_SECONDS) -> None:
        """Returns immediately: a thread waits for the port, `seconds` at most."""
        self._metrics, self._host, self._port, self._seconds = metrics, host, port, seconds
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._serving: tuple[WSGIServer, threading.Thread] | None = None
        self._binding = threading.Thread(target=self._bind, name="metrics", daemon=True)
        self._binding.start()

    def wait(self) -> bool:
        """Wait for the outcome of binding. Return whether it serves."""
        self._binding.join()
        return self._serving is not None

    def close(self) -> None:
        """Release the port. Waits no longer than CLOSE_SECONDS for a pending name lookup."""
        self._closing.set()
        self._binding.join(CLOSE_SECONDS)
        self._end()

    def _end(self) -> None:
        with self._lock:
            serving, self._serving = self._serving, None
        if serving is not None:
            server, thread = serving
            server.shutdown()
            server.server_close()
            thread.join()

    def _bind(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._closing.is_set():
            try:
                self._serving = start_http_server(self._port, self._host, registry=self._metrics.registry)
            except OSError as error:
                if time.monotonic() > deadline:
                    place = f"{self._host}:{self._port}"
                    log.warning("metrics are not served at %s: %s; set telemetry.metrics_port", place, error)
                    return
                self._closing.wait(1.0)
            else:
                log.info("metrics: http://%s:%d/metrics", self._host, self._port)
                if self._closing.is_set():  # meanwhile
                    self._end()
                return
