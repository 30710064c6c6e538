"""Histories for tests that read them: segments, and a manifest that names them."""

import json
from collections.abc import Sequence

from holdfast.store import Store, layout
from holdfast.telemetry import Row, segment


def write_segment(store: Store, run_id: str, after: int, rows: Sequence[Row], attempt: int) -> None:
    """Write the history of `attempt` above the step `after`, as just before a commit."""
    for key, text in segment(run_id, after, rows, attempt).items():
        store.put_if_absent(key, text.encode())


def commit(store: Store, run_id: str, step: int, history: Sequence[tuple[int, int]] = ((0, 1),)) -> None:
    """Write a manifest with the history up to `step`: (after, attempt), in the order of steps."""
    store.put(layout.checkpoint(run_id, step), json.dumps({"history": history}).encode())


def write_committed(store: Store, run_id: str, after: int, rows: Sequence[Row]) -> None:
    """Write the rows of attempt 1 after a step, and the checkpoint that covers them."""
    write_segment(store, run_id, after, rows, 1)
    if rows:
        commit(store, run_id, rows[-1]["step"])
