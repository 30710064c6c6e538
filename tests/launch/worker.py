"""A rank that acts by its arguments `RANK:DEED …`.

- number: exit with that code
- `raise`, `kill`, `term`: an exception, or that signal to itself
- `wait`: wait for a signal
- `ignore`: ignore SIGTERM, and wait
- `save`: exit with 204 on SIGTERM
- `peer`: exit with 202 on SIGTERM, like a rank that lost another one
- `parent`: wait, with a child that is `ready` in its place and ends two seconds later than a rank would

On one node, no rank exits or dies before the waiting ranks are ready. Where HOLDFAST_TEST_HELD names a file, the parent
of the ranks does not close their logs before that file exists.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.launch.exits import FOLDER_VARIABLE, RankRecord
from holdfast.launch.node.output import CLOSE_SECONDS, RankOutput
from holdfast.launch.processes import die_with_parent

WAITS = ("wait", "ignore", "save", "peer", "parent")
SECONDS = 600  # until a rank that gets no signal exits
CLOSING, HELD = "HOLDFAST_TEST_CLOSE_SECONDS", "HOLDFAST_TEST_HELD"

_close = RankOutput.close


def _patient(self: RankOutput, codes: Mapping[int, int], seconds: float = CLOSE_SECONDS) -> None:
    """Extend, in the process that starts the ranks and imports this module, the time for their last lines to the
    test's."""
    if HELD in os.environ:
        say("what started the ranks is held")
        await_file(HELD)
        say("the parent of the ranks continues")
    _close(self, codes, float(os.environ.get(CLOSING, seconds)))


def await_file(variable: str) -> None:
    """Wait for the file that a variable names, at most a minute, so that a failing test ends."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and not Path(os.environ[variable]).exists():
        time.sleep(0.01)


RankOutput.close = _patient  # type: ignore[method-assign]


def leave(record: RankRecord, code: int) -> None:
    record.ended(code)
    os._exit(code)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # in one write: ranks share a pipe
    sys.stdout.flush()


def main() -> None:
    die_with_parent()
    record = RankRecord()
    rank = os.environ["RANK"]
    actions = dict(argument.split(":", 1) for argument in sys.argv[1:] if ":" in argument)
    action, folder = actions[rank], Path(os.environ[FOLDER_VARIABLE])
    if action == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action in ("save", "peer"):
        signal.signal(signal.SIGTERM, lambda *_: leave(record, 204 if action == "save" else 202))
        record.formed(1)
    child = None
    if action == "parent":
        child = subprocess.Popen(["sleep", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say(f"rank {rank} pid {os.getpid() if child is None else child.pid} ready")
    if action in WAITS:
        (folder / f"ready-{rank}").touch()
        threading.Event().wait(SECONDS)
    one_node = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    waiting = [other for other, other_action in actions.items() if one_node and other_action in WAITS]
    while not all((folder / f"ready-{other}").exists() for other in waiting):
        time.sleep(0.01)
    if action in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)
        threading.Event().wait(SECONDS)
    say(f"rank {rank} leaves: {action}")
    if action == "raise":
        raise RuntimeError("a bug")
    leave(record, int(action))


if __name__ == "__main__":
    main()
