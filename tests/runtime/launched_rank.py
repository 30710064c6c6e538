"""Processes of a launch on one machine: what leads the ranks, and a rank, which prints its number and waits.

Each is forked from a server that is a process of the launch, too, as torchrun and its ranks are.
"""

import os
import sys
import threading

from holdfast.launch.processes import WarmServer

ADDED = {"RANK": "1", "WORLD_SIZE": "2", "HOLDFAST_CHECKPOINT_AGENT": "/agent", "OF_THE_RANK": "x" * 500}


def main() -> None:
    if "RANK" in os.environ:
        print(os.getpid(), flush=True)
        threading.Event().wait(600)
        return
    server = WarmServer.fork([__name__])
    server.start(__name__, sys.argv[1:], {**os.environ, **ADDED}).wait()
