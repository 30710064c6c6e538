"""A rank that stands by where its launch does, says its process id when its turn has come, and waits for a signal."""

from __future__ import annotations

import os
import sys
import threading

from holdfast.launch import turn
from holdfast.launch.orphan import die_with_parent
from tests.launch.worker import SECONDS, say


def main() -> None:
    die_with_parent()
    if turn.stands_by():
        turn.await_turn()
    say(f"rank {os.environ['RANK']} of {sys.argv[1]} pid {os.getpid()} begins")
    if os.environ["RANK"] == "0":
        turn.say_that_it_trains()
    threading.Event().wait(SECONDS)


if __name__ == "__main__":
    main()
