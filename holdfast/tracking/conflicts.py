"""Writes to MLflow that other processes make at the same moment.

MLflow looks whether a row is there and then inserts it, without a lock over both: of two writers of the same rows one
is refused by the database. That is a race lost and not an outage, and what the winner wrote is there to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 5

T = TypeVar("T")


def write_missing(missing: Callable[[], list[T]], write: Callable[[list[T]], object]) -> None:
    """Write what is `missing`; after a refusal look again, and write what is still missing then.

    A row can be inserted by others only once, so a race is lost at most once for each kind of row that one write makes:
    what is refused `TRIES` times is no race, and MLflow's own exception is raised. So is an outage, at once.
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
