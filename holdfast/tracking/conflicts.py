"""Writes to MLflow that race with writes of other processes.

MLflow checks for a row and then inserts it, without a lock over both. Of two writers of the same rows, the database
refuses one. That is a lost race and not an outage, and the winner's rows can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 5

T = TypeVar("T")


def write_missing(missing: Callable[[], list[T]], write: Callable[[list[T]], object]) -> None:
    """Write the rows that are `missing`. After a refusal, check again and write those that are still missing.

    Another process can insert a row only once, so a race is lost at most once for each kind of row that one write
    makes. A write that is refused `TRIES` times is no race, and MLflow's own exception is raised. An outage is raised
    immediately.
    """
    from mlflow.exceptions import MlflowException

    for tries_left in reversed(range(TRIES)):
        if not (left := missing()):
            return
        try:
            write(left)
            return
        except MlflowException as error:
            if not tries_left or error.error_code == "TEMPORARILY_UNAVAILABLE":
                raise
