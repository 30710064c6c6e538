"""Metrics, events and history of a run, kept in the store as the source of truth for MLflow and the report."""

from holdfast.telemetry.channel import emit
from holdfast.telemetry.event_log import read_events, recorded_step, recording
from holdfast.telemetry.events import Event
from holdfast.telemetry.history import Row, read_history, segment
from holdfast.telemetry.progress import ConsoleProgress, Progress

__all__ = [
    "ConsoleProgress",
    "Event",
    "Progress",
    "Row",
    "emit",
    "read_events",
    "read_history",
    "recorded_step",
    "recording",
    "segment",
]
