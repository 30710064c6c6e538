"""The notify step: the exit handler of the DAG, which says what happened, why, and where the log is."""

from holdfast.components.notify.summary import Summary, run

__all__ = ["Summary", "run"]
