"""Bounded, jittered retries under a deadline: one loop for everything that goes over a network.

Promises that an operation ends: with its result, with the error of a failure that repeating cannot mend, or with
StoreUnreachableError when its time is up. The caller says which failures are worth repeating.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.components.spec.errors import StoreUnreachableError

log = logging.getLogger("holdfast.store")

FIRST_PAUSE = 0.05  # seconds; doubles with every attempt...
LONGEST_PAUSE = 5.0  # ...up to here, and the actual pause is drawn evenly below it

Result = TypeVar("Result")


class RetryableError(Exception):
    """A failure that the next attempt may not meet. Never leaves this package."""


def retried(action: Callable[[int], Result], what: str, deadline: float) -> Result:
    """The result of `action(attempt)`, called again after every RetryableError for at most `deadline` seconds.
    `what` names the operation and the key in the error."""
    end = time.monotonic() + deadline
    attempt = 1
    while True:
        try:
            return action(attempt)
        except RetryableError as failure:
            pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))  # noqa: S311
            if time.monotonic() + pause >= end:
                raise StoreUnreachableError(
                    f"{what}: no success within {deadline:g} s, attempt {attempt} failed: {failure}; "
                    "see whether the endpoint is up and reachable, then run the same command again"
                ) from None
            log.log(logging.WARNING if attempt > 3 else logging.DEBUG, "%s: attempt %d: %s", what, attempt, failure)
        time.sleep(pause)
        attempt += 1
