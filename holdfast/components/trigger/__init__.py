"""The trigger step: whether a retraining is due, and why. The first step of a DAG that runs by itself."""

from holdfast.components.trigger.decision import Condition, Decision
from holdfast.components.trigger.step import run

__all__ = ["Condition", "Decision", "run"]
