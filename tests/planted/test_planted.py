"""The list of planted bugs fits the code as it is, and the script tells a caught bug from a survivor."""

from __future__ import annotations

from pathlib import Path

from tests.planted.__main__ import copy_of_the_tree, is_caught, misfits
from tests.planted.bug import Bug
from tests.planted.bugs import BUGS


def test_each_planted_bug_still_applies() -> None:
    """If this fails: write the bug anew for the code as it is now (python -m tests.planted tells how it fares)."""
    assert misfits(BUGS) == []
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS) >= 60


def test_a_bug_whose_text_is_gone_or_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    twice, gone = (Bug("a.py", old, "", "a.py", "reason") for old in ("x = 1", "y"))
    assert misfits([twice, gone], tmp_path) == [
        "a.py: 'x = 1' stands there 2 times, not once (reason)",
        "a.py: 'y' stands there 0 times, not once (reason)",
    ]


def test_a_bug_is_caught_or_survives_in_a_copy_and_leaves_it_sound(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    test = "tests/train/test_schedule.py"
    sound = (tree / "holdfast/components/train/schedule.py").read_text()
    (caught,) = [bug for bug in BUGS if "the first step would learn nothing" in bug.why]
    harmless = Bug(caught.file, "import math\n", "import math as math\n", test, "nothing")
    assert is_caught(caught, tree)
    assert not is_caught(harmless, tree)
    assert (tree / "holdfast/components/train/schedule.py").read_text() == sound
