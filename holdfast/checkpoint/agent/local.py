"""The work of the agent in threads of the rank, where no agent runs: a single process, a library, a test."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from holdfast.checkpoint.agent.buffers import boxes_in
from holdfast.checkpoint.agent.protocol import Outcome, Save
from holdfast.checkpoint.agent.tier_copies import TierCopies
from holdfast.checkpoint.agent.worker import SaveWorker, Work
from holdfast.checkpoint.local_tiers.peers import Server

CLOSE_SECONDS = 60.0  # limit for the saves in flight
SETTLE_SECONDS = 600.0  # limit for collection


class LocalSaver:
    """Takes saves as `AgentClient` does."""

    def __init__(self, work: Work, tell: Callable[[Outcome], None], near: TierCopies | None = None) -> None:
        self._saving = SaveWorker(work, tell, "this rank", near)
        self._near = near
        self._server: Server | None = None
        self._memory: dict[int, torch.Tensor] = {}

    def allocate(self, buffer: int, size: int) -> torch.Tensor:
        """See AgentClient."""
        self._memory[buffer] = torch.empty(size, dtype=torch.uint8)
        return self._memory[buffer]

    def save(self, save: Save) -> None:
        """See AgentClient."""
        assert save.buffer is not None, "nothing is saved twice without an agent"
        boxes = boxes_in(self._memory[save.buffer], save.slots)
        self._saving.save(save.request, boxes)

    def listen(self, listener: socket.socket, token: str) -> None:
        """See AgentClient."""
        if self._near is not None:
            self._server = Server(listener, token, self._near.run_id, self._near.tiers)

    def lost(self, step: int, reason: str) -> None:
        """See AgentClient."""
        self._saving.give_up(step, reason)

    def lift(self) -> None:
        """See AgentClient."""
        self._saving.lift()

    def settle(self) -> None:
        """Wait for the collection that follows a commit."""
        self._saving.settle(SETTLE_SECONDS)

    def close(self) -> None:
        """See AgentClient. Waits, since no other process finishes the work."""
        self._saving.hurry()
        self._saving.finish(CLOSE_SECONDS)
        self._saving.close()
        if self._server is not None:
            self._server.close(listener=True)
