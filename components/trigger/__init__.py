"""The trigger step: whether a retraining is due, and why. The first step of a DAG that runs by itself."""

from components.trigger.decision import Condition, Decision
from components.trigger.step import run

__all__ = ["Condition", "Decision", "run"]
