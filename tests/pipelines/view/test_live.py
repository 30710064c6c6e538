"""The screen of `holdfast watch`: the content of all events, and nothing else."""

import pytest
from rich.console import Console, RenderableType

from holdfast.pipelines.view.live import Screen, sparkline
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    LaunchBegan,
    LaunchEnded,
    Progress,
    SaveCommitted,
    StragglerDetected,
    TimeSpent,
)
from tests.telemetry.test_ledger import at, killed_once


def seen(screen: Screen, now: float) -> str:
    console = Console(width=110)
    with console.capture() as captured:
        console.print(screen.draw(now, console.width))
    return captured.get()


def test_a_run_that_trains_is_on_one_screen() -> None:
    screen = Screen("small", "fedcba9876543210")
    screen.take(event for event in killed_once() if event.time < 45)
    for step, loss in ((11, 4.0), (12, 2.0)):
        progress = Progress(
            step=step, steps=40, loss=loss, tokens_per_second=1e4, seconds_left=90, step_seconds=0.5, mfu=0.4
        )
        screen.take([at(45, progress, 2)])
    screen.take([at(46, SaveCommitted(step=10, seconds=1), 2)])
    screen.take([at(46, StragglerDetected(rank=1, phase="data", ratio=1.5, seconds=0.1, step=12), 2)])
    text = seen(screen, 48)
    expected = (
        "small  fedcba9876543210", "step 12 of 40", "1 min 30 s left", "█▁ 2.0000", "10,000 tokens/s", "40.0 % MFU",
        "saved step 10, 2 steps since", "goodput", "launch 1 ended (lost peer)", "resuming from step 10",
    )  # fmt: skip
    for phrase in expected:
        assert phrase in text, text
    assert not screen.has_ended


def test_the_live_screen_shows_why_a_run_is_pending_until_it_trains() -> None:
    screen = Screen("small", "r")
    screen.backend_lines = ["preprocess: PENDING  ImagePullBackOff: no such image"]
    assert "ImagePullBackOff: no such image" in seen(screen, 8)
    screen.take([at(7, AttemptBegan(world=2, step=0, steps=40), 1)])
    assert "ImagePullBackOff" not in seen(screen, 8)


def test_the_live_screen_shows_accelerator_metrics_and_throttled_ranks() -> None:
    screen = Screen("small", "r")
    screen.take([at(7, AttemptBegan(world=2, step=0, steps=40, missing_metrics={"celsius": "Not Supported"}), 1)])
    assert "accelerators" not in seen(screen, 8)
    cool = TimeSpent(rank=0, step=1, utilisation=0.9, watts=600.0, memory_used=60 * 10**9, memory_total=80 * 10**9)
    hot = cool.model_copy(update={"rank": 1, "watts": 400.0, "memory_used": 70 * 10**9, "clock_reasons": 0x24})
    screen.take([at(9, cool, 1), at(9, hot, 1)])
    text = seen(screen, 10)
    expected = (
        "accelerators: 90 % busy, 500 W each (1.00 kW), 70.0 of 80.0 GB in the fullest",
        "the accelerator of rank 1 is held back: hot", "not reported: celsius (Not Supported)",
    )  # fmt: skip
    for phrase in expected:
        assert phrase in text, text
    assert "°C" not in text and "MHz" not in text
    screen.take([at(11, AttemptBegan(world=1, step=1, steps=40), 2)])
    text = seen(screen, 12)
    assert "600 W each," in text and "held back" not in text, text
    screen.take([at(13, LaunchEnded(launch=1, code=0))])
    assert "accelerators" not in seen(screen, 14)


def test_the_live_screen_ends_with_the_run_and_marks_a_slow_rank() -> None:
    screen = Screen("small", "r")
    assert "nothing was reported yet" in seen(screen, 0)
    screen.take(killed_once())
    assert screen.has_ended
    assert "ranks ■ ■" in seen(screen, 60)
    screen.take([at(61, StragglerDetected(rank=1, phase="data", ratio=1.5, seconds=0.1, step=12), 2)])
    assert "ranks ■ ▲" in seen(screen, 62)


def test_a_run_that_ended_and_was_resumed_is_watched_until_its_new_launch_ends() -> None:
    screen = Screen("small", "r")
    sequence: list[tuple[Event, bool]] = [
        (LaunchBegan(launch=1, job="here", nodes=1, processes=2), False),
        (LaunchEnded(launch=1, code=205, restart_in=3.0), False),  # the next launch is coming
        (LaunchBegan(launch=2, job="here", nodes=1, processes=2), False),
        (LaunchEnded(launch=2, code=204), True),
        (LaunchBegan(launch=3, job="here", nodes=1, processes=2), False),  # by another command, an hour later
        (Progress(step=11, steps=40, loss=4.0, tokens_per_second=1e4, seconds_left=90, step_seconds=0.5), False),
        (LaunchEnded(launch=3, code=0), True),
    ]
    for number, (event, ends) in enumerate(sequence):
        screen.take([at(10 * number, event)])
        assert screen.has_ended is ends, event
    whole = Screen("small", "r")
    whole.take(at(10 * number, event) for number, (event, _) in enumerate(sequence[:-1]))
    assert not whole.has_ended  # read from the store together


@pytest.mark.parametrize(
    ("values", "width", "drawn"), [([], 5, ""), ([1.0], 5, "▁"), ([3, 1, 2, 8], 3, "▁▂█"), ([0, 7], 9, "▁█")]
)
def test_a_curve_is_a_row_of_bars(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_on_a_low_terminal_the_newest_of_what_happened_stays() -> None:
    screen = Screen("small", "r")
    screen.take(killed_once())
    console = Console(width=70, height=12)
    whole = [line.rstrip() for line in _lines(console, screen.draw(48, console.width))]
    low = [line.rstrip() for line in _lines(console, screen.draw(48, *console.size))]
    assert len(whole) > console.height >= len(low), low
    assert low[-2:] == whole[-2:], low  # the last line, and the frame
    assert low[1] == whole[1], low


def _lines(console: Console, drawn: RenderableType) -> list[str]:
    return ["".join(segment.text for segment in line) for line in console.render_lines(drawn)]
