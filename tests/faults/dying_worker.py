"""A rank that is killed (-9) the moment its copy of a step is complete: `WHOM` in HOLDFAST_TEST_DIES, "rank:step"."""

from __future__ import annotations

import os
import signal

from holdfast.components.checkpoint.agent.link import AgentLink
from holdfast.components.checkpoint.agent.wire import Save
from holdfast.components.train import worker


def main() -> None:
    """See `worker.main`."""
    hand_over = AgentLink.save
    rank, step = os.environ["HOLDFAST_TEST_DIES"].split(":")

    def dying(self: AgentLink, save: Save) -> None:
        hand_over(self, save)
        if save.step == int(step) and os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    AgentLink.save = dying  # type: ignore[method-assign]
    worker.main()
