"""Planted bugs: small realistic mistakes, each with the tests that must notice it.

They are listed in bugs/*.txt. `file` and `test` apply to all bugs below them, until the next `file` or `test`. `bug`
names the consequence. Lines with + replace lines with -.
"""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("bugs")


@dataclass(frozen=True)
class Bug:
    """`old` occurs exactly once in `file` and becomes `new`. Then one of `tests` must fail, because of `why`."""

    file: str
    old: str
    new: str
    tests: str  # paths for pytest, separated by spaces
    why: str


def read_bugs(text: str) -> list[Bug]:
    """The bugs of a list."""
    bugs: list[Bug] = []
    headers = {"file": "", "test": "", "bug": ""}
    lines: dict[str, list[str]] = {"-": [], "+": []}
    for line in [*text.splitlines(), "bug"]:
        word, _, rest = line.partition(" ")
        if word in headers and lines["-"]:
            old, new = ("\n".join(lines[sign]) for sign in "-+")
            bugs.append(Bug(headers["file"], old, new, headers["test"], headers["bug"]))
            lines = {"-": [], "+": []}
        if word in lines:
            lines[word].append(rest)
        elif word in headers:
            headers[word] = rest
        elif word not in ("", "#"):
            raise ValueError(f"{line!r} is no line of a list of bugs; begin it with file, test, bug, -, + or #")
    return bugs


BUGS = [bug for path in sorted(FOLDER.glob("*.txt")) for bug in read_bugs(path.read_text(encoding="utf-8"))]
