"""Every command of `holdfast` that a message, a page or a manifest names exists, with its options."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from holdfast.pipelines.cli import app

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".sh", ".ipynb", ".toml", ".Dockerfile", ".json"}
ELSEWHERE = ("CHANGELOG.md", "docs/decisions/", "tests/", "holdfast/pipelines/backends/kubeflow/generated")
COMMAND = re.compile(r"(?:`|^\s*(?:\$ |- run: )?|: |; |\(|&& )holdfast ([a-z][a-z-]*(?: [^`;&|#\n]*)?)", re.MULTILINE)
LISTED = re.compile(r"command: \[[\"']?holdfast[\"']?, ([a-z][^\]]*)\]")  # in a manifest
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
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)


def problem(words: list[str]) -> str:
    """What is wrong with a command line; empty if it names a command and options that exist."""
    command = TOP
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options_used = [argument.partition("=")[0] for argument in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", argument)]
    return "".join(f"no option {option} " for option in options_used if option not in options | {"--help"})


def wrong_commands(path: Path) -> list[str]:
    """The commands in a file that do not exist."""
    problems = []
    for text in texts(path):
        for match in COMMAND.finditer(text):
            arguments = match[1].rstrip(".,:)").split()
            if message := problem(arguments):
                problems.append(f"{path.name}: holdfast {match[1]}: {message}")
        for match in LISTED.finditer(text):
            if message := problem([word.strip(" \"'") for word in match[1].split(",")]):
                problems.append(f"{path.name}: holdfast {match[1]}: {message}")
    return problems


def files() -> list[Path]:
    """The files of the repository that can name a command."""
    output = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in output.splitlines() if not line.startswith(ELSEWHERE)]
    candidates = [ROOT / path for path in paths if path.suffix in SUFFIXES and (ROOT / path).is_file()]
    return [path for path in candidates if re.search(rb"holdfast\W? ", path.read_bytes())]


def test_every_command_that_is_named_exists() -> None:
    assert [command for path in files() for command in wrong_commands(path)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("holdfast submit SPEC", "no command 'submit'"),
        ("see `holdfast checkpoints burn RUN`", "no command 'burn'"),
        ("`holdfast run SPEC --fast`", "no option --fast"),
        ("to continue: holdfast resume 3f2a", ""),
        ('command: [holdfast, replay, --within, "24"]', "no command 'replay'"),
        ('command: [holdfast, audit, replay, --within, "24"]', ""),
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, wrong: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert (wrong in "".join(wrong_commands(page))) if wrong else wrong_commands(page) == []


def test_make_bench_runs_every_benchmark_of_the_page() -> None:
    named = set(re.findall(r"python -m (benchmarks\.\w+)", (ROOT / "docs/benchmarks.md").read_text()))
    recipe = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert named - set(re.findall(r"benchmarks\.\w+", recipe)) == set()
    assert "benchmarks._" not in recipe
