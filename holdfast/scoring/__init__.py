"""Scoring of a model on held-out text, and the verdicts on models in the store.

The evaluate step, the retraining trigger and the register step share it. A champion that scores worse triggers a
retraining, and only the judged model is registered. Importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.scoring.verdict import (
    Measured,
    Verdict,
    key_against,
    newest_record,
    reached_against,
    record_order,
    settings_key,
)

if TYPE_CHECKING:
    from holdfast.spec.operations import Task

__all__ = [
    "Measured",
    "Verdict",
    "key_against",
    "newest_record",
    "reached_against",
    "record_order",
    "require_tasks",
    "settings_key",
]


def require_tasks(tasks: Sequence[Task], context: int) -> None:
    """Check the tasks of a spec, for a model of this context. See `task_files`. Raises MissingError or DataError for
    a task that cannot be scored."""
    if tasks:
        from holdfast.scoring import task_files

        task_files.require_tasks(tasks, context)
