"""A step whose pipeline was killed has time to save and exit, unless the user interrupts the wait."""

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from holdfast.pipelines.backends.local.follow import Signals, View, _wait_for_orphans
from holdfast.pipelines.view.terminal import Board
from holdfast.steps.outcomes import Outcome
from holdfast.telemetry.event_log import PipeEvents


def waited_for(folder: Path, code: str, *received: int) -> int:
    """The exit code of a step that runs this code after its pipeline has died."""
    signals = Signals()
    signals.received.extend(received)
    command = ["sh", "-c", '"$0" -c "$1" & echo $!; wait $!; echo $?', sys.executable, code]  # it is not our child
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        Outcome("train", int(shell.stdout.readline()), time.time()).write(folder)
        with Board(Console(file=io.StringIO())) as board:
            _wait_for_orphans(folder, View(board, folder, PipeEvents(folder / "events")), signals)
        return int(shell.stdout.readline())


def test_a_run_is_waited_for_and_a_second_signal_kills_it(tmp_path: Path) -> None:
    assert waited_for(tmp_path, "import sys, time; time.sleep(1); sys.exit(204)", signal.SIGINT) == 204
    assert waited_for(tmp_path, "import time; time.sleep(600)", signal.SIGINT, signal.SIGINT) == 128 + signal.SIGKILL
