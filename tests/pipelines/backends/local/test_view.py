"""The terminal of a local run shows the content of events, and nothing from a log."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.pipelines.backends.local.follow import View
from holdfast.pipelines.view import terminal
from holdfast.pipelines.view.terminal import Board
from holdfast.steps.outcomes import Outcome
from holdfast.telemetry import emit
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import AttemptBegan, LaunchEnded, PhaseProgress, Progress


def test_progress_and_news_are_shown_under_the_step_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "events"))
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL", 0.0)
    output, folder = io.StringIO(), tmp_path / "outcomes"
    folder.mkdir()
    with Board(Console(file=output, width=120)) as board:
        view = View(board, folder, PipeEvents(tmp_path / "events"))
        preprocess, train = Outcome("preprocess", os.getpid(), 1.0), Outcome("train", os.getpid(), 2.0)
        preprocess.write(folder)
        emit(PhaseProgress(phase="tokenise", done=2, total=5))
        view.look()
        preprocess.ended, preprocess.exit_code, preprocess.result = 2.0, 0, "abc"
        preprocess.write(folder)
        train.write(folder)
        emit(AttemptBegan(attempt=1, world=2, step=0, steps=300, device="cpu"))
        emit(LaunchEnded(launch=1, code=137, restart_in=0.0, detail="rank 1"))
        emit(AttemptBegan(attempt=2, world=2, step=50, steps=300, device="cpu"))
        emit(Progress(step=120, steps=300, loss=3.21, grad_norm=1, tokens_per_second=15200, seconds_left=70))
        view.look()
        emit(PhaseProgress(phase="export", done=1, total=2))
        train.ended, train.exit_code, train.result = 5.0, 0, "run"
        train.write(folder)
        view.look()
    shown = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    progress = "step 120/300 (40 %) loss 3.2100 grad_norm 1.000 15,200 tokens/s 00:01:10 left"
    assert [line for line in shown if not line.startswith("train") or "step" in line] == [
        "preprocess begins",
        shown[1],
        "✓ preprocess 1.0 s dataset abc",
        "launch 1 ended (killed); starting the next in 0 s: rank 1",
        "attempt 2: resuming from step 50 of 300 on cpu x 2",
        shown[6],
        f"✓ train 3.0 s {progress}",
    ]
    assert shown[1].startswith("preprocess") and shown[1].endswith("tokenise 40 %")
    assert shown[6].startswith("train") and shown[6].endswith(progress)


def test_a_stop_says_what_the_running_step_does(tmp_path: Path) -> None:
    """Only a training saves."""
    folder = tmp_path / "outcomes"
    folder.mkdir()
    view = View(Board(Console(file=io.StringIO())), folder, PipeEvents(tmp_path / "events"))
    assert view.stop_effect() == "the run ends before its next step"
    train = Outcome("train", os.getpid(), 1.0)
    train.write(folder)
    assert view.stop_effect() == "the training saves and exits"
    train.ended, train.exit_code = 2.0, 0
    train.write(folder)
    evaluate = Outcome("evaluate", os.getpid(), 3.0)
    evaluate.write(folder)
    assert view.stop_effect() == "the step evaluate ends, and the same command starts it again"
    evaluate.ended, evaluate.exit_code = 4.0, 0
    evaluate.write(folder)
    Outcome("notify", os.getpid(), 5.0).write(folder)
    assert view.stop_effect() == "the run ends before its next step"
