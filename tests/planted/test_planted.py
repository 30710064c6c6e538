"""The list of planted bugs fits the current code, and the script distinguishes a caught bug from a survivor."""

from pathlib import Path

import pytest

from tests.planted.__main__ import copy_of_the_tree, is_caught, misfits
from tests.planted.bug import BUGS, Bug


def test_each_planted_bug_still_applies() -> None:
    """If this fails, rewrite the bug for the current code, and check it with python -m tests.planted."""
    assert misfits(BUGS) == []
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS) >= 60


def test_a_planted_bug_with_missing_or_ambiguous_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    twice, missing = (Bug("a.py", old, "", "a.py", "reason") for old in ("x = 1", "y"))
    assert misfits([twice, missing], tmp_path) == [
        "a.py: 'x = 1' stands there 2 times, not once (reason)",
        "a.py: 'y' stands there 0 times, not once (reason)",
    ]


@pytest.mark.slow
def test_a_bug_is_caught_or_survives_and_leaves_the_tree_sound(tmp_path: Path) -> None:
    sound = "import math\n\ndef half(x):\n    return math.floor(x / 2)\n"
    (tmp_path / "a.py").write_text(sound)
    (tmp_path / "test_a.py").write_text("from a import half\n\ndef test_half():\n    assert half(6) == 3\n")
    assert is_caught(Bug("a.py", "x / 2", "x / 3", "test_a.py", "a third"), tmp_path)
    assert not is_caught(Bug("a.py", "math\n", "math as math\n", "test_a.py", "nothing"), tmp_path)
    assert (tmp_path / "a.py").read_text() == sound


def test_the_copy_of_the_tree_has_what_git_tracks_and_no_more(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    assert (tree / "components").is_symlink() and (tree / "holdfast/spec/plan.py").is_file()
    assert not (tree / ".git").exists() and not (tree / ".venv").exists()
