"""Profiles of some steps of a live run, with torch's profiler on rank 0, on request (`holdfast profile`).

Rank 0 polls for a request every few seconds, in a thread that no step waits for. A profile begins and ends between two
steps. The trace is written and uploaded while training continues. Profiles change no bit of the run.
"""

import gzip
import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.checkpoint import Attempt
from holdfast.rank.measure.phase_timer import trace_ranges
from holdfast.rank.observers import FinishedStep
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import HoldfastError
from holdfast.store import Store
from holdfast.telemetry import emit, phases
from holdfast.telemetry.events import ProfileSaved, WarningIssued
from holdfast.telemetry.phases import RangeMarker
from holdfast.telemetry.profiles import Window, clear_request, pending_request, trace_key

LOOK_SECONDS = 5.0  # between two polls for a request
LEAVE_SECONDS = 60.0  # for a trace that is being written when the run ends
HURRY_SECONDS = 2.0  # the same when the rank is stopped or fails
READ_BYTES = 2**20

log = logging.getLogger("holdfast.train")


class Profiler:
    """An observer that profiles requested steps, inside a `with` block."""

    def __init__(self, store: Store, attempt: Attempt, *, active: bool) -> None:
        """`active` is true on the rank that profiles."""
        self._store, self._attempt, self._active = store, attempt, active
        self._looked, self._look_now = -math.inf, threading.Event()
        self._looking: threading.Thread | None = None
        self._found: Window | None = None
        self._window: Window | None = None  # that is being profiled
        self._profile: profile | None = None
        self._ranges_before: RangeMarker | None = None  # while a profile shows the phases
        self._writing: threading.Thread | None = None
        self._clearing: threading.Thread | None = None  # clears a request
        self._closed = False

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer. Called between two steps."""
        if not self._active:
            return
        if self._profile is not None and self._window is not None:
            if finished.step >= self._window.last:
                self._end(self._profile, self._window)
        elif self._found is not None:
            self._perhaps_begin(self._found, finished.step + 1)
        elif time.monotonic() - self._looked >= LOOK_SECONDS and not self._is_writing():
            self._looked = time.monotonic()
            self._look_now.set()
            if self._looking is None:  # one thread for all polls: if a new one gets no memory, Python waits forever
                self._looking = threading.Thread(target=self._poll_requests, name="profile requests", daemon=True)
                self._looking.start()

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(in_time=kind is None)

    def close(self, *, in_time: bool = True) -> None:
        """Wait for a trace that is being written: a minute if `in_time`. A rank that must stop has a grace period, and
        a failed rank has peers that wait, so these wait two seconds."""
        if self._profile is not None and self._window is not None:
            self._end(self._profile, self._window, keep=in_time)
        self._closed = True
        self._look_now.set()
        for thread in (self._writing, self._clearing if in_time else None):
            if thread is not None:
                thread.join(LEAVE_SECONDS if in_time else HURRY_SECONDS)
        if self._is_writing():
            emit(WarningIssued(message="a profile is lost: the rank ended before its trace was written"))

    def _is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def _poll_requests(self) -> None:
        while self._look_now.wait() and not self._closed:
            self._look_now.clear()
            self._look()

    def _look(self) -> None:
        try:
            self._found = pending_request(self._store, self._attempt.run_id)
        except HoldfastError as error:
            log.debug("profile requests cannot be read: %s", error)

    def _perhaps_begin(self, window: Window, step: int) -> None:
        """Begin the profile if `step` is its first step."""
        if window.first == 0:
            window = Window(step, step + window.last)
        if step < window.first:
            return
        self._found = None
        if step > window.first:
            message = f"steps {window.first} to {window.last} are not profiled: step {step} is the next one"
            emit(WarningIssued(message=f"{message}; ask for later ones, or for the next ten with --steps 10"))
            self._forget()
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._forget()  # in any case, the next attempt does not repeat the request
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:
            self._lost(window, error)
            return
        self._window, self._profile = window, profiler
        self._ranges_before = phases.mark_ranges(trace_ranges())
        log.info("steps %d to %d are profiled", window.first, window.last)

    def _end(self, taken: profile, window: Window, *, keep: bool = True) -> None:
        self._profile = self._window = None
        phases.mark_ranges(self._ranges_before)
        self._looked = time.monotonic()
        try:
            taken.stop()
        except RuntimeError as error:
            self._lost(window, error)
            return
        if not keep:
            self._lost(window, "the run was left")
            return
        self._writing = threading.Thread(target=self._write, args=(taken, window), name="profile", daemon=True)
        self._writing.start()

    def _write(self, taken: profile, window: Window) -> None:
        key = trace_key(self._attempt.run_id, self._attempt.number, window.first, window.last)
        try:
            with temporary_folder("profile") as folder:
                plain, compressed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
                # Neither call holds the interpreter's lock, as torch's table of the operations does for a minute.
                taken.export_chrome_trace(str(plain))
                with plain.open("rb") as trace, gzip.open(compressed, "wb", compresslevel=1) as file:
                    shutil.copyfileobj(trace, file, READ_BYTES)
                self._store.upload(compressed, key)
            emit(ProfileSaved(first=window.first, last=window.last, key=key))
        except (HoldfastError, OSError, RuntimeError) as error:
            self._lost(window, error)

    @staticmethod
    def _lost(window: Window, why: object) -> None:
        emit(WarningIssued(message=f"the profile of steps {window.first} to {window.last} is lost: {why}"))

    def _forget(self) -> None:
        def forget() -> None:
            try:
                clear_request(self._store, self._attempt.run_id)
            except HoldfastError as error:
                log.debug("the request for a profile stays: %s", error)

        self._looked = time.monotonic()
        self._clearing = threading.Thread(target=forget, name="profile requests", daemon=True)
        self._clearing.start()
