"""Logs of single ranks. On every backend the ranks keep them in the store, so all backends share this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.pipelines.backends.interface import Backend
from holdfast.runtime.logs import plain
from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.telemetry import rank_reader


def rank_lines(
    store: Store,
    run_id: str,
    rank: int,
    *,
    attempt: int | None = None,
    launch: int | None = None,
    running: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """The log lines of a rank, for a person. See `rank_reader.rank_lines`."""
    lines = rank_reader.rank_lines(store, run_id, rank, attempt=attempt, launch=launch, running=running)
    return (text for line in lines for text in plain(line).splitlines() or [""])


def goes_on(backend: Backend, run: str) -> bool:
    """Whether a run is unfinished according to its backend, and so may still print."""
    try:
        return backend.status(run).unfinished
    except MissingError:
        return False
