"""Output of the command: into pipes whose reader leaves, closed streams, other encodings and terminals."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.markup import escape

from holdfast.pipelines.cli import options
from holdfast.pipelines.view.terminal import Board, SafeConsole
from holdfast.runtime import environment
from holdfast.runtime.output import prepare_streams, without_controls
from holdfast.spec.errors import SpecError

COMMAND = [sys.executable, "-m", "holdfast.pipelines.cli"]
HOSTILE = "a\x1b]52;c;cm0gLXJm\x07b\x1b[2Jc\x9b31md\x07e\x1bPq#0\x1b\\f\u202eg\rh\x00"


def shell(script: str, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOLDFAST_HOME": str(home)}
    argv = ["bash", "-c", f"set -o pipefail; {script}", "bash", *(command or COMMAND)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        '"$@" validate --schema | head -1', '"$@" --help | true', '"$@" validate --schema | true', '"$@" --version >&-',
        '"$@" --version <&- 2>&-', '"$@" runs --json | true',
    ],
)  # fmt: skip
def test_a_reader_that_leaves_and_a_closed_stream_are_no_failure(tmp_path: Path, script: str) -> None:
    result = shell(script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from holdfast.runtime.output import prepare_streams, watch_reader\n"
        "from holdfast.pipelines.view.terminal import SafeConsole\n"
        "from holdfast.pipelines.view.terminal import Board\n"
        "prepare_streams(); watch_reader()\n"
        "with Board(SafeConsole()) as board:\n"
        "    board.say('first'); sys.stdout.flush(); sys.stdin.read()\n"
        "    for _ in range(3): board.say('more'); sys.stdout.flush()\n"
        "sys.exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 7


def test_a_file_that_is_opened_later_does_not_get_what_is_printed(tmp_path: Path) -> None:
    code = (
        "from holdfast.runtime.output import prepare_streams; prepare_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('printed'); file.write('written')\n"
        "assert file.fileno() > 2"
    )
    assert shell('"$@" >&- 2>&- <&-', tmp_path, sys.executable, "-c", code).returncode == 0
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_the_encoding_lacks_ends_nothing(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    prepare_streams()
    options.out("Grüße → 世界 🎉")
    with Board(SafeConsole()) as board:
        board.end("train", 1.0, 0, "Grüße → 世界 🎉")
    sys.stdout.flush()
    assert b"\\u2192" in raw.getvalue() and b"train" in raw.getvalue()


def test_text_of_others_is_shown_on_a_terminal_and_never_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_controls(HOSTILE) == "abcdefg\nh"
    assert without_controls("plain\ttext\r\nGrüße 世界 🎉") == "plain\ttext\nGrüße 世界 🎉"
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        options.out(HOSTILE)
        terminal.flush()
        output = os.read(outer, 4096)
        SafeConsole(file=terminal, force_terminal=True, color_system=None).print(escape(HOSTILE))
        terminal.flush()
        output += os.read(outer, 4096)
    os.close(outer)
    assert b"\x1b" not in output and b"\x07" not in output and b"\xc2\x9b" not in output
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    options.out(HOSTILE)
    assert piped.getvalue() == HOSTILE + "\n"  # a file gets the original text


def test_a_missing_home_error_names_the_variables_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(_: int) -> None:
        raise KeyError("no entry")

    for name in ("HOME", "HOLDFAST_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(SpecError, match="set HOME or HOLDFAST_HOME"):
        environment.home()
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "")
    environment.give_home()
    assert Path.home() == tmp_path


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_user_without_a_home_gets_an_error_and_no_traceback(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from holdfast.pipelines.cli import main\n"
        "import holdfast.runtime.environment, holdfast.pipelines.view.catalog\n"
        "import holdfast.store.file, holdfast.store, holdfast.pipelines.paths\n"
        "import holdfast.pipelines.cli.runs\n"
        "import holdfast.pipelines.view.report, yaml\n"
        "os.environ.pop('HOME', None); os.environ.pop('HOLDFAST_HOME', None); os.environ.pop('HOLDFAST_STORE', None)\n"
        "os.chdir('/'); os.setgid(61009); os.setuid(61009)\n"
        "sys.argv = ['holdfast', 'runs']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "set HOME or HOLDFAST_HOME" in result.stderr and "Traceback" not in result.stderr
    assert result.returncode == 10
