"""Retries of store requests under a deadline.

Every operation ends: with its result, with the error of a permanent failure, or with StoreUnreachableError at the
deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from holdfast.runtime import retry
from holdfast.spec.errors import StoreUnreachableError

log = logging.getLogger("holdfast.store")

FIRST_PAUSE = 0.1  # seconds
LONGEST_PAUSE = 5.0
UNREACHABLE_REMEDY = "see whether the endpoint is up and reachable, then run the same command again"
LONGEST_ASKED = 15.0  # the longest Retry-After that is respected: the deadline is ours

Result = TypeVar("Result")


class RetryableError(Exception):
    """A failure that another attempt may not meet. Never leaves this package. `at_least`: seconds to wait at the
    server's request. `remedy`: what a person does when no attempt succeeds."""

    attempt = 1  # the number of the failed attempt

    def __init__(self, message: str, at_least: float = 0.0, remedy: str = UNREACHABLE_REMEDY) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.at_least = min(at_least, LONGEST_ASKED)


def retried(action: Callable[[int], Result], what: str, deadline: float) -> Result:
    """The result of `action(attempt)`, called again after every RetryableError for at most `deadline` seconds. `what`
    names the operation and the key in the error."""

    def numbered(attempt: int) -> Result:
        try:
            return action(attempt)
        except RetryableError as failure:
            failure.attempt = attempt
            raise

    def note(attempt: int, failure: BaseException) -> None:
        log.log(logging.WARNING if attempt > 3 else logging.DEBUG, "%s: attempt %d: %s", what, attempt, failure)

    try:
        return retry.retried(
            numbered,
            _passes,
            first=FIRST_PAUSE,
            longest=LONGEST_PAUSE,
            seconds=deadline,
            at_least=lambda failure: getattr(failure, "at_least", 0.0),
            note=note,
        )
    except RetryableError as failure:
        raise StoreUnreachableError(
            f"{what}: no success within {deadline:g} s, attempt {failure.attempt} failed: {failure}; {failure.remedy}"
        ) from None


def _passes(failure: BaseException) -> bool:
    return isinstance(failure, RetryableError)
