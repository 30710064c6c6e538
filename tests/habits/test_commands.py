"""Every command of `holdfast` that a message, a page or a manifest names exists, with its options."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from holdfast.pipelines.cli import app

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".sh", ".ipynb", ".toml", ".Dockerfile", ".json"}
ELSEWHERE = ("CHANGELOG.md", "docs/decisions/", "tests/", "holdfast/pipelines/backends/kubeflow/generated")
COMMAND = re.compile(r"(?:`|^\s*(?:\$ |- run: )?|: |; |\(|&& )holdfast ([a-z][a-z-]*(?: [^`;&|#\n]*)?)", re.MULTILINE)
TOP = typer.main.get_command(app)


def texts(path: Path) -> Iterator[str]:
    """The texts of a file: the strings and docstrings of Python code, else all of it."""
    content = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".py":
        yield content
        return
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values)


def problem(words: list[str]) -> str:
    """What is wrong with a command line; empty if it names a command and options that exist."""
    command: click.Command = TOP
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word)]
    return "".join(f"no option {word} " for word in given if word not in options | {"--help"})


def wrong_commands(path: Path) -> list[str]:
    """The commands in a file that do not exist."""
    found = []
    for text in texts(path):
        for match in COMMAND.finditer(text):
            words = match[1].rstrip(".,:)").split()
            if wrong := problem(words):
                found.append(f"{path.name}: holdfast {match[1]}: {wrong}")
    return found


def files() -> list[Path]:
    """The files of the repository that can name a command."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if not line.startswith(ELSEWHERE)]
    named = [ROOT / path for path in paths if path.suffix in SUFFIXES and (ROOT / path).is_file()]
    return [path for path in named if b"holdfast " in path.read_bytes()]


def test_every_command_that_is_named_exists() -> None:
    assert [wrong for path in files() for wrong in wrong_commands(path)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("holdfast submit SPEC", "no command 'submit'"),
        ("see `holdfast checkpoints burn RUN`", "no command 'burn'"),
        ("`holdfast run SPEC --fast`", "no option --fast"),
        ("to continue: holdfast resume 3f2a", ""),
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, wrong: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert (wrong in "".join(wrong_commands(page))) if wrong else wrong_commands(page) == []
