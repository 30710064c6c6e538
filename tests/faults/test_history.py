"""The history checker accepts a sound history and names the problems of any other."""

import re
from typing import Any

import pytest

from tests.faults.history import wrongs


def row(step: int, loss: float = 1.0, tokens: int | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "tokens": tokens or 8 * step,
        "samples": "00",
    }


SOUND: dict[str, Any] = {
    "steps": 4,
    "rows": [row(step) for step in range(1, 5)],
    "lineage": [(0, 1), (2, 3)],
    "commits": [(1, 2), (3, 3), (3, 4)],
    "samples": ["00"] * 4,
    "measured": [(1, row(1)), (1, row(2)), (1, row(3)), (3, row(3)), (3, row(4))],
}


def test_a_sound_history_has_nothing_wrong() -> None:
    assert wrongs(**SOUND) == []


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("rows", [row(1), row(2), row(4)], r"has the steps \[1, 2, 4\], not each of 4 once"),
        ("rows", [row(1), row(2), row(2), row(3), row(4)], "not each of 4 once"),
        ("rows", [row(1), row(2, tokens=24), row(3), row(4)], "samples are lost or repeated"),
        ("samples", ["00", "00", "01", "00"], "step 3 was fed other samples"),
        ("lineage", [(0, 3), (2, 1)], "attempt 1 resumed above 2 after attempt 3"),
        ("commits", [(1, 2), (1, 2)], r"attempt 1 committed \[2, 2\], not in the order"),
        ("commits", [(3, 3), (1, 4)], "attempt 1 committed step 4 after attempt 3 had"),
        ("measured", [(1, row(3)), (3, row(3, loss=1.5))], "step 3 of attempt 3 has other bits than that of attempt 1"),
    ],
)
def test_each_problem_of_a_history_is_reported(part: str, value: Any, words: str) -> None:
    problems = wrongs(**{**SOUND, part: value})
    assert re.search(words, problems[0]), problems
