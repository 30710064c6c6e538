"""The process's side of a launch that stands by: it was started before its turn, and waits for it.

Whoever starts it gives every process of the launch one end of a stream socket as its standard input, and says in
HOLDFAST_TURN whether it has to wait. What is told there is looked at and never read, so that one byte is heard by all
of them; a line that closes instead says that there will be no turn. Until then a process shows this module as its
command (`ps`): it is no rank, no torchrun and no agent yet, for whoever looks for one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from holdfast.launch.warm import SHOWN_AS, show_command

VARIABLE = "HOLDFAST_TURN"
WAIT, NOW = "wait", "now"  # its values, where there is a line; without the variable there is none
READY, TRAINS, BEGIN = b"r", b"t", b"b"  # said by each rank at its gate, by rank 0 after its first step, by the starter
OVERLAPS = "HOLDFAST_MAY_OVERLAP"  # "1" where the next launch needs nothing that the kernel still has of ended ranks
OVER = "\0over\n"  # ends what a launch prints that anybody waits for
MODULE = __name__

_held: list[int] = []  # the line's descriptor, where this process keeps it elsewhere than at its standard input


def of_a_standby() -> dict[str, str]:
    """What the environment of a launch that stands by adds to its own."""
    return {VARIABLE: WAIT, SHOWN_AS: MODULE}


def stands_by() -> bool:
    """Whether this process has to wait for its turn."""
    return os.environ.get(VARIABLE) == WAIT


def _line() -> int:
    return _held[0] if _held else 0


def hold_line() -> None:
    """Keep the line to this process: what it starts has an empty standard input."""
    if VARIABLE in os.environ and not _held:
        _held.append(os.dup(0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def await_turn() -> None:
    """Say that this rank is ready, and wait for its turn; SIGTERM ends it meanwhile, and so does, with 0, a line that
    closes. Main thread only."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    show_command([sys.executable, "-m", MODULE, "ready"])
    _say(READY)
    if not _told():
        os._exit(0)
    _take()


def show_when_it_comes() -> None:
    """Go on, and show what this process is when its turn has come, if it stands by and that ever happens."""

    def wait() -> None:
        with suppress(OSError):  # started otherwise than its launch, and without its line
            if _told():
                _take()

    if stands_by():
        threading.Thread(target=wait, name="turn", daemon=True).start()


def say_that_it_trains() -> None:
    """Tell whoever started this launch that it trains: there is time now to make the next one ready."""
    if os.environ.get(VARIABLE) == NOW:
        _say(TRAINS)


def may_overlap() -> bool:
    """Whether the next launch may begin while the ranks of this one, which have left, are still being buried."""
    return VARIABLE in os.environ and os.environ.get(OVERLAPS) == "1"


def say_that_it_is_over() -> None:
    """Tell whoever started this launch that its ranks have ended, how is written down, and what they handed over is
    committed: what this process still does, the next launch need not wait for. It stands in what is printed, behind all
    that they printed."""
    if os.environ.get(VARIABLE) == NOW:
        with suppress(OSError):
            os.write(1, OVER.encode())


def _told() -> bool:
    with socket.socket(fileno=os.dup(_line())) as line:
        return bool(line.recv(1, socket.MSG_PEEK))


def _say(word: bytes) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(_line(), word)


def _take() -> None:
    os.environ[VARIABLE] = NOW
    os.environ.pop(SHOWN_AS, None)  # what this process starts is what it is called
    show_command(sys.orig_argv)
