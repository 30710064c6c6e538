"""What a run measures, kept in the store as the truth that MLflow and the report are drawn from."""

from components.telemetry.history import Row, read_history, write_segment

__all__ = ["Row", "read_history", "write_segment"]
