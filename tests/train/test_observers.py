"""The history of a run: complete at any speed of the saving thread, and small on ranks that do not write it."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Attempt
from holdfast.collectives import Gang
from holdfast.engines.interface import StepOutput
from holdfast.rank.measure.throughput import Throughput
from holdfast.rank.observers import BatchDigest, FinishedStep, History, Progress
from holdfast.spec.errors import DivergedError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import events, read_history
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from tests.telemetry.histories import commit
from tests.train.tiny_run import tiny_assignment


def finished(step: int, loss: float = 1.0, norm: float = 1.0) -> FinishedStep:
    return FinishedStep(step, 0.1, StepOutput(torch.tensor(loss), torch.tensor(norm)), float(step))


def committing(store: Store, history: History, step: int, attached: Mapping[str, str]) -> None:
    """Commit in another thread, concurrently with training."""
    for key, text in attached.items():
        store.put(key, text.encode())
    history.committed(step)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


def test_no_row_is_lost_between_training_and_the_thread_that_commits(tmp_path: Path, hasty_threads: None) -> None:
    store, history = (
        open_store(f"file://{tmp_path}"),
        History(tiny_assignment(), Attempt("run", 7), 0, BatchDigest(Gang(), speaks=True)),
    )
    thread: threading.Thread | None = None
    for step in range(1, 601):
        history.on_step(finished(step))
        history.latest()
        if step % 3 == 0:
            if thread:
                thread.join()
            thread = threading.Thread(target=committing, args=(store, history, step, history.on_save(step)))
            thread.start()
    assert thread is not None
    thread.join()
    commit(store, "run", 600, [(0, 7)])
    assert [row["step"] for row in read_history(store, "run")] == list(range(1, 601))


def test_a_segment_ends_where_its_checkpoint_does_and_begins_where_the_newest_commit_does() -> None:
    history = History(tiny_assignment(), Attempt("run", 2), 6, BatchDigest(Gang(), speaks=True))
    for step in range(7, 13):  # training runs ahead of the committing thread
        history.on_step(finished(step))
    first, second = history.on_save(9), history.on_save(11)  # before the first save is committed
    history.committed(9)
    third = history.on_save(12)
    row_counts = {key: len(text.splitlines()) for key, text in {**first, **second, **third}.items()}
    assert row_counts == {
        layout.metrics("run", 6, 9, 2): 3, layout.metrics("run", 6, 11, 2): 5, layout.metrics("run", 9, 12, 2): 3,
    }  # fmt: skip


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_a_step_that_is_not_finite_keeps_the_state_from_being_saved_on_every_rank(loss: float, norm: float) -> None:
    for keep in (True, False):
        history = History(tiny_assignment(), Attempt("run", 7), 0, BatchDigest(Gang(), speaks=True), keep)
        history.on_step(finished(1))
        history.on_step(finished(2, loss, norm))
        history.on_step(finished(3))
        with pytest.raises(DivergedError, match=r"step 2: loss .*training.optimizer.learning_rate"):
            history.on_save(3)


def test_the_metrics_of_an_objective_are_in_the_rows_of_the_history() -> None:
    history = History(tiny_assignment(), Attempt("run", 7), 0, BatchDigest(Gang(), speaks=True))
    one = torch.tensor(1.0)
    for step in (1, 2):
        metrics = {"reward_accuracy": torch.tensor(0.25 * step)}
        history.on_step(FinishedStep(step, 0.1, StepOutput(one, one, metrics=metrics), float(step)))
    (text,) = history.on_save(2).values()
    assert [json.loads(line)["objective.reward_accuracy"] for line in text.splitlines()] == [0.25, 0.5]


def test_a_rank_that_does_not_write_the_history_does_not_keep_it() -> None:
    history = History(tiny_assignment(), Attempt("run", 7), 0, BatchDigest(Gang(), speaks=True), keep=False)
    for step in range(1, 10):
        history.on_step(finished(step))
        assert history.on_save(step) == {}
    assert history._rows == []


@pytest.mark.parametrize(
    ("steps", "every", "shown"),
    [
        (6, 10, [1, 2, 3, 4, 5, 6]),
        (10, 10, list(range(1, 11))),
        (19, 20, [2, 4, 6, 8, 10, 12, 14, 16, 18, 19]),
        (25, 10, [10, 20, 25]),
        (40, 100, list(range(4, 41, 4))),
    ],
)
def test_a_run_shorter_than_the_interval_has_progress_lines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, every: int, shown: list[int]
) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "events"))
    assignment = tiny_assignment(f"training.steps={steps}", f"training.log_every={every}")
    history = History(assignment, Attempt("run", 7), 0, BatchDigest(Gang(), speaks=True))
    progress = Progress(assignment, history, 0, Throughput(1, 1.0, None))
    for step in range(1, steps + 1):
        history.on_step(finished(step))
        progress.on_step(finished(step))
    emitted = PipeEvents(tmp_path / "events").new()
    assert [event.step for event in emitted if isinstance(event, events.Progress)] == shown
