"""What the terminal shows of a running pipeline."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.pipelines.view.terminal import Board, duration, notice_of, progress_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (12.3, "12 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_progress_line_of_the_log_becomes_readable() -> None:
    line = "    INFO holdfast.train: progress step=120/300 loss=3.2101 tokens_per_s=15200 eta=00:01:10"
    assert progress_of(line) == "step 120/300 (40 %)  loss 3.2101  15,200 tokens/s  00:01:10 left"


def test_a_phase_of_the_log_becomes_readable() -> None:
    assert progress_of("    2026-01-01T00:00:00Z INFO    holdfast: tokenise: 40%\n") == "tokenise 40%"
    assert progress_of('{"time": 1, "logger": "holdfast", "message": "score: 40%"}') == "score 40%"


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "    t WARNING holdfast.launch: launch 1 ended (killed); starting the next in 0 s. The log is /a/b.log\n",
            "launch 1 ended (killed); starting the next in 0 s",
        ),
        (
            "t INFO holdfast.train: attempt 2: resuming from step 50 of 300 on cpu x 2\n",
            "attempt 2: resuming from step 50 of 300 on cpu x 2",
        ),
        (
            '{"time": 1.5, "level": "INFO", "logger": "holdfast.train", "message": "attempt 2: resuming from step 5"}',
            "attempt 2: resuming from step 5",
        ),
        ("t INFO holdfast.train: attempt 1: starting from step 0 of 300 on cpu x 2\n", None),
        ("launch 1 ended (killed)", None),
    ],
)
def test_what_happened_to_the_gang_is_said(line: str, notice: str | None) -> None:
    assert notice_of(line) == notice


@pytest.mark.parametrize("line", ["", "no news", "making progress slowly", "progress report: fine"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert progress_of(line) is None


def test_in_a_ci_log_every_event_is_one_line() -> None:
    output = io.StringIO()
    with Board(Console(file=output, width=80)) as board:
        board.begin("train", 0.0)
        board.progress("step 1/2 [x]")
        board.tick()  # too soon for another line
        board.end("train", 83.0, code=0, text="step 2/2")
        board.begin("evaluate", 0.0)
        board.end("evaluate", 1.0, code=11)
        board.begin("register", 0.0)
        board.end("register", 2.0, code=143)
    assert output.getvalue().splitlines() == [
        "  train       begins",
        "✓ train       1 min 23 s  step 2/2",
        "  evaluate    begins",
        "✗ evaluate        1.0 s",
        "  register    begins",
        "■ register        2.0 s",
    ]
