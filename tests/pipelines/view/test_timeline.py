"""The timeline of a run in `holdfast show`."""

from pathlib import Path

import pytest

from holdfast.pipelines.view.report import print_run, timeline
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.store import open_store
from holdfast.telemetry import emit, read_events, recording
from holdfast.telemetry.events import AttemptBegan, LaunchEnded, Progress, SaveCommitted


def test_the_timeline_has_what_matters_in_order_and_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(f"file://{tmp_path}")
    with recording(store, "r", "rank 0", launch=1, attempt=1):
        emit(AttemptBegan(world=2, step=0, steps=90, device="cpu"))
        for step in (10, 20, 30):
            emit(Progress(step=step, steps=90, loss=1, grad_norm=1, tokens_per_second=1, seconds_left=1))
            emit(SaveCommitted(step=step, seconds=1, stall_seconds=0.25))
    with recording(store, "r", "train"):
        emit(LaunchEnded(launch=1, code=137, restart_in=0.0))
    with recording(store, "r", "rank 0", launch=2, attempt=2):
        emit(AttemptBegan(world=2, step=30, steps=90, device="cpu"))
        emit(SaveCommitted(step=40, seconds=1))
        emit(Progress(step=41, steps=90, loss=1, grad_norm=1, tokens_per_second=1, seconds_left=1))
    assert [(source, event) for _, source, event in timeline(read_events(store, "r"))] == [
        ("rank 0", "attempt 1: starting from step 0 of 90 on cpu x 2"),
        ("rank 0", "saved 3 checkpoints, steps 10 to 30; training waited 0.75 s"),
        ("train", "launch 1 ended (killed); starting the next in 0 s"),
        ("rank 0", "attempt 2: resuming from step 30 of 90 on cpu x 2"),
        ("rank 0", "saved step 40 in 1.0 s; training waited 0.00 s"),
        ("rank 0", "step 41/90 (45 %)  loss 1.0000  grad_norm 1.000  1 tokens/s  00:00:01 left"),
    ]
    print_run(RunRecord("r"), store)
    assert "launch 1 ended (killed); starting the next in 0 s" in capsys.readouterr().out


def test_a_run_without_events_has_no_timeline() -> None:
    assert list(timeline([])) == []
