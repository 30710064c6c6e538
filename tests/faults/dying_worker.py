"""A rank that is killed (-9) once its copy of a step, and every other rank's, is complete. HOLDFAST_TEST_DIES says
which: `WHOM` is "rank:step".
"""

import os
import signal
import time
from pathlib import Path

from holdfast.checkpoint.agent.client import AgentClient
from holdfast.checkpoint.agent.protocol import Save
from holdfast.launch.exits import FOLDER_VARIABLE
from holdfast.rank import worker


def main() -> None:
    """See `worker.main`."""
    hand_over, folder = AgentClient.save, Path(os.environ[FOLDER_VARIABLE])
    rank, step = os.environ["HOLDFAST_TEST_DIES"].split(":")

    def dying(self: AgentClient, save: Save) -> None:
        hand_over(self, save)
        if save.step != int(step):
            return
        (folder / f"copied-{os.environ['RANK']}").touch()
        if os.environ["RANK"] == rank:
            while len(list(folder.glob("copied-*"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)

    AgentClient.save = dying  # type: ignore[method-assign]
    worker.main()
