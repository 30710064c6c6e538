"""The language of the project: words to avoid, short sentences on the pages, one type for each class name.

`python -m tests.habits.test_language` lowers the numbers and shortens the lists below to the current state.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "holdfast").rglob("*.py"))
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]

AVOIDED = (
    "told", "said", "whoever", "nobody", "somebody", "whatever", "beside",
    "mend", "mends", "mended", "mending", "linger", "lingers", "lingering",
    "bury", "buries", "buried", "burial", "burials", "befall", "befalls", "befell", "unleash", "unleashed",
    "crown", "crowned", "forgive", "forgiven", "pardon", "pardoned",
    "so many", "of its own", "for good", "at once", "in turn", "goes on", "the others", "what it is called",
)  # fmt: skip
AVOIDED_ON_PAGES = (*AVOIDED, "asked", "is there", "are there")

# How often the words may occur in a folder; 0 in the others. Lower a number when you rewrite; never raise one.
CEILINGS: dict[str, int] = {
    "holdfast/pipelines": 2, "pages": 1,
}  # fmt: skip

MAX_WORDS = 30  # of a sentence on a page
# Pages with longer sentences, which are not rewritten yet. Remove a page when it passes; never add one.
LONG_SENTENCES: set[str] = set()

# Names that several classes share. Remove a name when it is unique; never add one.
SHARED_CLASS_NAMES: set[str] = {
    "Accelerator", "Anomalies", "Attempt", "Base", "Checkpoint", "Choice", "Clock", "Cluster", "Comparison",
    "ConflictError", "Entry", "Finding", "Found", "Job", "LossScale", "Machine", "Manifest", "Measured", "Memory",
    "ModelRegistry", "Node", "Nodes", "Origin", "Outcome", "Part", "Piece", "Pipeline", "Place", "Prepared",
    "Progress", "Record", "RefusedError", "Registration", "Report", "Request", "Resources", "Row", "Rows", "Run",
    "Server", "Slurm", "Source", "Started", "Step", "Submitted", "Target", "Task", "Tokenizer", "Topology",
    "Totals", "_Answer", "_Attempt", "_Claim", "_Copy", "_Described", "_Log", "_Named", "_Part", "_Rank", "_Record",
    "_Submission", "_Verdict",
}  # fmt: skip


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """A page without code blocks and addresses of links."""
    page = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", page)


def sentences_of(page: str) -> Iterator[str]:
    """The sentences of paragraphs and list items; not those of tables and headings."""
    lines = [line for line in prose_of(page).splitlines() if not line.lstrip().startswith(("|", "#", ":::"))]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)", "\n".join(lines)):
        text = " ".join(re.sub(r"`[^`]*`", "x", re.sub(r"^\s*(?:[-*+]|\d+\.)\s", "", block)).split())
        yield from re.split(r"(?<=[.!?])[*_)\"]*\s+", text)


def long_sentences_of(page: str) -> list[str]:
    return [sentence for sentence in sentences_of(page) if len(re.findall(r"\w[\w'./-]*", sentence)) > MAX_WORDS]


def occurrences_in(text: str, words: tuple[str, ...] = AVOIDED) -> int:
    """How often the words occur as whole words, in any case, also as parts of an identifier and across lines."""
    tokens = re.findall(r"[a-z]+", text.lower())
    counts, joined = Counter(tokens), f" {' '.join(tokens)} "
    return sum(joined.count(f" {word} ") if " " in word else counts[word] for word in words)


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if len(parts) > 2 else 1]) if parts[0] == "holdfast" else "pages"


@cache
def occurrences() -> dict[str, int]:
    texts: dict[str, list[str]] = {}
    for path in MODULES:
        texts.setdefault(folder_of(path), []).append(read(path))
    counts = {folder: occurrences_in("\n.\n".join(modules)) for folder, modules in texts.items()}
    counts["pages"] = sum(occurrences_in(prose_of(read(page)), AVOIDED_ON_PAGES) for page in PAGES)
    return dict(sorted(counts.items()))


@cache
def shared_class_names() -> set[str]:
    names = Counter(name for path in MODULES for name in re.findall(r"^class (\w+)", read(path), re.MULTILINE))
    return {name for name, count in names.items() if count > 1}


def pages_with_long_sentences() -> set[str]:
    return {page.name for page in PAGES if long_sentences_of(read(page))}


def test_words_to_avoid_become_fewer_in_every_folder() -> None:
    more = {folder: count for folder, count in occurrences().items() if count > CEILINGS.get(folder, 0)}
    assert not more, f"see AVOIDED: {more}; at most { ({folder: CEILINGS.get(folder, 0) for folder in more}) }"


def test_sentences_of_the_pages_are_short() -> None:
    long = pages_with_long_sentences()
    for name in sorted(long - LONG_SENTENCES):
        page = next(page for page in PAGES if page.name == name)
        assert not long_sentences_of(read(page)), f"{name}: over {MAX_WORDS} words"
    assert not LONG_SENTENCES - long, "these pages pass now: remove them from LONG_SENTENCES"


def test_two_types_have_two_names() -> None:
    shared = shared_class_names()
    assert not shared - SHARED_CLASS_NAMES, "another class has this name already"
    assert not SHARED_CLASS_NAMES - shared, "these names are unique now: remove them from SHARED_CLASS_NAMES"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0), ("He told, and TOLD.", 2), ("def was_told(self): ...", 1), ("retold besides turned", 0),
        ("it goes\n# on", 1), ("at_once()", 1), ("for goodness, in turns", 0), ("what it is called", 1),
    ],
)  # fmt: skip
def test_whole_words_are_counted_in_any_case_and_in_identifiers(text: str, count: int) -> None:
    assert occurrences_in(text) == count


@pytest.mark.parametrize(
    ("page", "long"),
    [
        ("word " * 31 + ".", 1), ("word " * 30 + ".", 0), ("# " + "word " * 40, 0), ("| " + "word " * 40 + "|", 0),
        ("```\n" + "word " * 40 + "\n```", 0), ("word " * 20 + "\nlast. " + "word " * 20 + ".", 0),
        ("- " + "word " * 20 + "\n- " + "word " * 20, 0), ("- " + "word " * 20 + "\n  " + "word " * 20, 1),
        ("[" + "word " * 20 + "](a.md#" + "x-" * 40 + ")", 0),
    ],
)  # fmt: skip
def test_sentences_are_counted_without_code_tables_and_addresses(page: str, long: int) -> None:
    assert len(long_sentences_of(page)) == long


def lower() -> None:
    """Write lower numbers and shorter lists into this file; never higher or longer ones."""
    counts, long, shared = occurrences(), pages_with_long_sentences(), shared_class_names()
    values = {
        "CEILINGS": [f'"{folder}": {min(most, counts.get(folder, 0))}' for folder, most in CEILINGS.items()],
        "LONG_SENTENCES": [f'"{name}"' for name in sorted(LONG_SENTENCES & long)],
        "SHARED_CLASS_NAMES": [f'"{name}"' for name in sorted(SHARED_CLASS_NAMES & shared)],
    }
    here = Path(__file__)
    text = here.read_text(encoding="utf-8")
    for name, entries in values.items():
        lines = textwrap.fill(", ".join(entries) + ",", 116, initial_indent="    ", subsequent_indent="    ")
        text = re.sub(
            rf"^({name}\b[^\n]*= {{)\n.*?^}}", rf"\1\n{lines}\n}}", text, count=1, flags=re.MULTILINE | re.DOTALL
        )
    here.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    lower()
