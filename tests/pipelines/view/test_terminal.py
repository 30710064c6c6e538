"""Terminal output of a running pipeline."""

import io
import math

import pytest
from rich.console import Console

from holdfast.pipelines.view import terminal
from holdfast.pipelines.view.terminal import Board, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (12.3, "12 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_in_a_ci_log_every_event_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PLAIN_INTERVAL", math.inf)
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
