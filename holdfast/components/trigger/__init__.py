"""Trigger step: decides whether a retraining is due, and why. It is the first step of a scheduled DAG."""

from holdfast.components.trigger.decision import Condition, Decision
from holdfast.components.trigger.step import run

__all__ = ["Condition", "Decision", "run"]
