"""A step that fails in a way that may pass tries again by itself, within the budget of `cluster.retries`.

The engines above cannot be relied on for it: Kubeflow Pipelines 2.17 sets `retryPolicy: OnError` for every template,
under which a step that ends with any exit code is not tried again, and older ones OnFailure, under which a lost pod is
not (docs/retries.md). Whatever the table calls permanent leaves at once, and so does a step that was asked to leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from holdfast.runtime.exits import code_of
from holdfast.runtime.leaving import was_asked_to_leave
from holdfast.runtime.retry import retried
from holdfast.spec.cluster import Retries
from holdfast.spec.errors import ExitCode, HoldfastError, TerminatedError

log = logging.getLogger("holdfast.retries")

T = TypeVar("T")
_LEFT = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED)  # because somebody asked for it


def passes(error: BaseException) -> bool:
    """Whether the same step may succeed in this very process."""
    if was_asked_to_leave() or (isinstance(error, HoldfastError) and error.tried_again):
        return False
    code = code_of(error)
    return code.retryable and code not in _LEFT


def with_retries(step: str, action: Callable[[], T], retries: Retries) -> T:
    """What `action` returns, called again, at most `retries.budget` times, after failures that pass. Raises the last
    one. Between two calls it waits `retries.backoff_seconds`, doubling up to `retries.longest_seconds`."""

    def note(failures: int, error: BaseException) -> None:
        log.warning("%s: %s; tries again by itself (%d of %d)", step, error, failures, retries.budget)
        if was_asked_to_leave():  # while it logged, which swallows what a signal handler raises
            raise TerminatedError("asked to leave (SIGTERM)") from error

    return retried(
        lambda _: action(),
        passes,
        first=retries.backoff_seconds,
        longest=max(retries.backoff_seconds, retries.longest_seconds),
        tries=retries.budget + 1,
        note=note,
    )
