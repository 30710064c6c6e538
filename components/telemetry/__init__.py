"""What a run measures, kept in the store as the truth that MLflow and the report are drawn from."""

from holdfast.components.telemetry.history import Row, read_history, write_segment
from holdfast.components.telemetry.progress import ConsoleProgress, Progress

__all__ = ["ConsoleProgress", "Progress", "Row", "read_history", "write_segment"]
