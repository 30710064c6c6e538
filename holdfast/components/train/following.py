"""The step process while its gang trains: the ranks' events go to the log, Argo, traces, metrics and trackers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

from holdfast.spec import HoldfastError, Spec
from holdfast.spec.errors import PreemptedError, TerminatedError
from holdfast.store import Store
from holdfast.telemetry import read_events, recorded_step
from holdfast.telemetry.channel import show_in_argo
from holdfast.telemetry.cost import cost
from holdfast.telemetry.event_log import StoreEvents
from holdfast.telemetry.events import Event, SaveCommitted
from holdfast.telemetry.ledger import ledger
from holdfast.telemetry.serving import show_traces, showing_metrics
from holdfast.tracking import Status, Tracker, open_all

if TYPE_CHECKING:
    from holdfast.telemetry.metrics import Metrics
    from holdfast.telemetry.traces import Traces

log = logging.getLogger("holdfast.train")

STEP = "train"
FOLLOW_SECONDS = 2.0  # between two reads of the ranks' events
FAREWELL_SECONDS = 30.0  # to report the end to the trackers


@contextmanager
def recorded_training(spec: Spec, identity: str, dataset_id: str, store: Store) -> Iterator[Callable[[str], None]]:
    """Record the training of a run in its events, in metrics, traces and trackers. Yields the function that takes its
    result."""
    trackers, events = open_all(spec, identity, dataset_id, store), StoreEvents(store, identity)
    with showing_metrics(spec.telemetry, identity, whole=True) as metrics:
        traces, before = show_traces(identity), _read_new_events(events, metrics)
        if traces is not None:
            traces.remember(before)
        last = max((event.time for event in before), default=0.0)
        with (
            _following_events(events, trackers, cache(partial(_accounts, spec, identity, store)), metrics, traces),
            recorded_step(store, identity, STEP, not_before=last) as ended,
        ):
            yield ended


@contextmanager
def _following_events(
    events: StoreEvents,
    trackers: Sequence[Tracker],
    figures: Callable[[], dict[str, float]],
    metrics: Metrics | None,
    traces: Traces | None,
) -> Iterator[None]:
    """Forward the ranks' events to the log, to Argo and to a trace collector. Copy metrics to the trackers at each
    checkpoint. At the end, report how the run ended, and its `figures`."""
    finished = threading.Event()
    status: Status = "FAILED"

    def follow() -> None:
        for tracker in trackers:  # while the ranks start, so that the imports take no cores from a step
            _try_to(tracker.begin, tracker)
            _try_to(tracker.sync, tracker)
        try:
            while True:
                last = finished.wait(FOLLOW_SECONDS)
                if _pass_on(events, metrics, traces):
                    for tracker in trackers:
                        _try_to(tracker.sync, tracker)
                if last:
                    break
            for tracker in trackers:  # first: a long run has many events, and little time is left
                _try_to(partial(tracker.finish, status), tracker)
            for tracker in trackers:
                _try_to(partial(_log_figures, tracker, figures), tracker)
        finally:
            if traces is not None:
                traces.close()

    thread = threading.Thread(target=follow, name="events-of-ranks", daemon=True)
    thread.start()
    try:
        yield
        status = "FINISHED"
    except (PreemptedError, TerminatedError):
        status = "KILLED"
        raise
    finally:
        finished.set()
        thread.join(FAREWELL_SECONDS)
        if thread.is_alive():
            names = " or ".join(tracker.name for tracker in trackers)
            log.warning("%s does not answer; what it misses is safe in the store, and the next step copies it", names)


def _accounts(spec: Spec, run_id: str, store: Store) -> dict[str, float]:
    """How the run spent its time, and its cost."""
    events = read_events(store, run_id)
    account = ledger(events)
    return account.figures() | cost(spec, events, account).figures()


def _read_new_events(events: StoreEvents, metrics: Metrics | None) -> list[Event]:
    """The new events of a run. The metrics include them from now on."""
    new = events.new()
    if metrics is not None:
        for event in new:
            _pass_on_to(partial(metrics.take, event))
        _pass_on_to(metrics.look)
    return new


def _pass_on(events: StoreEvents, metrics: Metrics | None, traces: Traces | None) -> bool:
    """Forward the ranks' new events to the log, Argo and traces. Returns whether a checkpoint is among them."""
    try:
        new = _read_new_events(events, metrics)
    except HoldfastError as error:  # the next call reads them
        log.debug("the events of the ranks cannot be read: %s", error)
        return False
    for event in new:
        if event.source != STEP and not event.silent:
            log.log(logging.WARNING if event.is_news else logging.INFO, "%s", event.text)
            _pass_on_to(partial(show_in_argo, event))
        if traces is not None:
            _pass_on_to(partial(traces.take, event, steps=False))
    return any(isinstance(event, SaveCommitted) for event in new)


def _pass_on_to(listener: Callable[[], object]) -> None:
    """Call a listener. Its failure is logged. It stops neither the thread that follows the events nor other
    listeners."""
    try:
        listener()
    except Exception as error:  # noqa: BLE001 - logged, and the store has the truth
        log.warning("the ranks' events are not passed on: %s: %s", type(error).__name__, error)


def _log_figures(tracker: Tracker, figures: Callable[[], dict[str, float]]) -> None:
    tracker.log_figures(figures())


def _try_to(copy: Callable[[], object], tracker: Tracker) -> None:
    """Call a method of a tracker. Its failure is logged and does not change how a run ends."""
    try:
        copy()
    except Exception as error:  # noqa: BLE001 - logged, and the store has the truth
        log.warning("metrics are not copied to %s: %s", tracker.name, error)
