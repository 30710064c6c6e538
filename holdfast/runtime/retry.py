"""Trying again what may pass: one bounded, jittered loop for all that goes over a network, over tenacity.

Promises that it ends, with the result or with the last failure itself. The caller says which failures may pass, for how
long it is worth waiting, and what the last failure means.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import TypeVar

import tenacity

Result = TypeVar("Result")


def pause(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after so many failures in a row (from 1): `first`, doubling up to `longest`, of which a random
    half is taken off so that many who failed together do not come back together."""
    return min(longest, first * 2 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)  # noqa: S311


def retried(
    action: Callable[[int], Result],
    passes: Callable[[BaseException], bool],
    *,
    first: float,
    longest: float,
    seconds: float = math.inf,
    tries: int = sys.maxsize,
    at_least: Callable[[BaseException], float] = lambda failure: 0.0,  # noqa: ARG005
    note: Callable[[int, BaseException], None] = lambda attempt, failure: None,  # noqa: ARG005
) -> Result:
    """The result of `action(attempt)`, called again after a failure that `passes`, for at most `seconds` or `tries`.
    Raises the failure that was the last.

    `first` and `longest` bound the pauses, see `pause`; a failure may ask for one of `at_least` so many seconds.
    `note` hears of every failure that is followed by another attempt.
    """

    def wait(state: tenacity.RetryCallState) -> float:
        return max(at_least(_failure(state)), pause(state.attempt_number, first, longest))

    def before_sleep(state: tenacity.RetryCallState) -> None:
        note(state.attempt_number, _failure(state))

    end = tenacity.stop_before_delay(seconds) | tenacity.stop_after_attempt(tries)
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception(passes),
        stop=end,
        wait=wait,
        before_sleep=before_sleep,
        reraise=True,
    ):
        with attempt:
            return action(attempt.retry_state.attempt_number)
    raise AssertionError("the last attempt returns or raises")


def _failure(state: tenacity.RetryCallState) -> BaseException:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert failure is not None
    return failure
