"""What a run measures, kept in the store as the truth that MLflow and the report are drawn from."""

from holdfast.components.telemetry.channel import emit
from holdfast.components.telemetry.event_log import read_events, recorded_step, recording
from holdfast.components.telemetry.events import Event
from holdfast.components.telemetry.history import Row, read_history, segment
from holdfast.components.telemetry.progress import ConsoleProgress, Progress

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
