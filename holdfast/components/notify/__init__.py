"""Notify step: the exit handler of the DAG. It reports the outcome, the reason and the location of the log."""

from holdfast.components.notify.ending import PipelineExit
from holdfast.components.notify.summary import Summary, run

__all__ = ["PipelineExit", "Summary", "run"]
