"""Trigger step: decides whether a retraining is due, and why. It is the first step of a scheduled DAG."""

from holdfast.components.trigger.step import Condition, Decision, run

__all__ = ["Condition", "Decision", "run"]
