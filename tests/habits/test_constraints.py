"""constraints.txt pins what the extras install: no more, no less, and in these versions."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[2] / ".ci/constraints.py"))


def test_constraints_are_exactly_what_the_extras_install() -> None:
    """If this fails: make constraints"""
    assert TOOL["differences"](TOOL["pinned"](), TOOL["wanted"]()) == []


def test_missing_unneeded_and_different_pins_are_reported() -> None:
    differences = TOOL["differences"](
        {"kept": "1", "moved": "1", "left": "1"}, {"kept": "1", "moved": "2", "brought": "1"}
    )
    assert differences == [
        "brought==1 is needed and not pinned",
        "left==1 is pinned and no package needs it",
        "moved is pinned to 1, and 2 is installed",
    ]
