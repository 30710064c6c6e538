"""How a model scores on held-out text, and how the verdict on a model is recorded and found again.

A part, because not only the evaluate step asks: a retraining may be due because the champion scores worse than it did,
and what is registered must be what was judged. Importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.scoring.measured import Measured
from holdfast.scoring.verdict import Verdict, key_against, reached_against, settings_key

if TYPE_CHECKING:
    from holdfast.spec.operations import Task

__all__ = ["Measured", "Verdict", "key_against", "reached_against", "require_tasks", "settings_key"]


def require_tasks(tasks: Sequence[Task]) -> None:
    """Raises MissingError or DataError where one of the tasks of a spec could not be scored. See `tasks`."""
    if tasks:
        from holdfast.scoring import tasks as downstream

        downstream.require_tasks(tasks)
