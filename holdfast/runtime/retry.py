"""Retries: one bounded, jittered loop over tenacity, and the retries of a step within `cluster.retries`.

The loop ends with the result or with the last failure itself. The caller decides which failures may pass, how long to
wait, and what the last failure means.
"""

import logging
import math
import random
import sys
from collections.abc import Callable
from typing import TypeVar

import tenacity

from holdfast.runtime.exits import code_of, shutdown_requested
from holdfast.spec.cluster import Retries
from holdfast.spec.errors import ExitCode, HoldfastError, TerminatedError

log = logging.getLogger("holdfast.retries")

Result = TypeVar("Result")
_LEFT = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED)  # because a person or the cluster requested it


def pause(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after this many consecutive failures (from 1): `first`, doubling up to `longest`. A random half
    of it is subtracted, so that many callers that failed together do not retry together."""
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
    Raises the last failure.

    `first` and `longest` bound the pauses, see `pause`. `at_least` returns the minimum pause after a failure, in
    seconds. `note` is called for every failure that another attempt follows.
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


def is_retryable(error: BaseException) -> bool:
    """Whether the same step may succeed in this process."""
    if shutdown_requested() or (isinstance(error, HoldfastError) and error.tried_again):
        return False
    code = code_of(error)
    return code.retryable and code not in _LEFT


def with_retries(step: str, action: Callable[[], Result], retries: Retries) -> Result:
    """The result of `action`, called again after retryable failures, at most `retries.budget` times. Raises the last
    failure. Between two calls it waits `retries.backoff_seconds`, doubling up to `retries.max_backoff_seconds`."""

    def note(failures: int, error: BaseException) -> None:
        log.warning("%s: %s; tries again by itself (%d of %d)", step, error, failures, retries.budget)
        if shutdown_requested():  # during the log call, which swallows exceptions of a signal handler
            raise TerminatedError("stop requested (SIGTERM)") from error

    return retried(
        lambda _: action(),
        is_retryable,
        first=retries.backoff_seconds,
        longest=max(retries.backoff_seconds, retries.max_backoff_seconds),
        tries=retries.budget + 1,
        note=note,
    )
