"""Consensus of the nodes' watchdogs on a hang: which rank do all other ranks wait for, on any node.

They exchange messages through the ranks' TCP store, which torchrun hosts on the first node. The messages are sealed
with the key of the launch, so a message from outside the launch is ignored. Every operation ends within SECONDS. All
nodes act on the same verdict, the first one. A node that reaches no other node decides alone.
"""

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from holdfast.launch.node.hangs import Watched
from holdfast.runtime.heartbeat import Seen
from holdfast.runtime.node import node_name
from holdfast.runtime.sealing import seal, unseal

log = logging.getLogger("holdfast.launch")

SECONDS = 5.0  # for one operation
TOGETHER = 4.0  # to collect the stacks of all nodes
MAX_BYTES = 1 << 20  # of a node's message
SILENT = 10.0  # seconds without a new message after which a node counts as stopped


class HangDecision(BaseModel, frozen=True):
    """The verdict on a hang."""

    words: str
    suspects: frozenset[int]  # of ranks
    nodes: int  # number of nodes that have suspects


class HangConsensus:
    """This node's connection to the consensus. Only one thread may use it."""

    def __init__(self, environment: Mapping[str, str], launch_key: str = "") -> None:
        """`environment` is that of a rank. Raises RuntimeError if the store does not respond."""
        from torch.distributed import TCPStore

        self._node, self._nodes = int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
        self._key = (
            f"holdfast/watchdog/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{environment['WORLD_SIZE']}"
        )
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SECONDS))
        self._launch_key, self._messages = launch_key, 0
        self._heard: dict[int, tuple[int, float]] = {}  # node → number of its last message, and seconds since then

    @staticmethod
    def is_for(environment: Mapping[str, str]) -> bool:
        """Whether there are several nodes, and a store that outlives a rank."""
        several = int(environment.get("GROUP_WORLD_SIZE", "1")) > 1
        return several and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def exchange(self, mine: Sequence[Watched], passed: float) -> list[tuple[str, Watched]]:
        """Send the state of this node's ranks. Returns (node, state) of every known rank, including these. `passed` is
        the time in seconds since the last call. Raises RuntimeError if the store does not respond."""
        self._messages += 1
        own = {"number": self._messages, "node": node_name(), "ranks": [_packed(rank) for rank in mine]}
        self._store.set(f"{self._key}/{self._node}", self._sealed(str(self._node), json.dumps(own)))
        peers = [node for node in range(self._nodes) if node != self._node]
        keys = [f"{self._key}/{node}" for node in peers]
        states = [(node_name(), rank) for rank in mine]
        if not self._store.check(keys):  # some have not started
            return states
        for node, sealed in zip(peers, self._store.multi_get(keys), strict=True):
            try:
                message = json.loads(self._opened(str(node), sealed))
            except ValueError as error:
                log.warning("what the store holds for node %d is ignored: %s", node, error)
                continue
            before, silent = self._heard.get(node, (0, 0.0))
            silent = silent + passed if message["number"] == before else 0.0
            self._heard[node] = (message["number"], silent)
            states += [(message["node"], _unpacked(rank, silent)) for rank in message["ranks"]]
        return states

    def decide(self, verdict: HangDecision) -> HangDecision:
        """The verdict that counts: this one, or an earlier one of another node. Raises RuntimeError if the store does
        not respond."""
        offered = self._sealed("verdict", verdict.model_dump_json())
        return self._verdict(self._store.compare_set(f"{self._key}/verdict", "", offered)) or verdict

    def together(self) -> None:
        """Wait until all nodes are ready to end their ranks: a rank whose peer has ended leaves, and no longer
        responds. Waits at most TOGETHER seconds, because a node may be silent. Raises RuntimeError if the store does
        not respond."""
        self._store.set(f"{self._key}/ready/{self._node}", "")
        deadline = time.monotonic() + TOGETHER
        while not self._store.check([f"{self._key}/ready/{node}" for node in range(self._nodes)]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def verdict(self) -> HangDecision | None:
        """The verdict of another node, if any. Raises RuntimeError if the store does not respond."""
        if not self._store.check([f"{self._key}/verdict"]):
            return None
        return self._verdict(self._store.get(f"{self._key}/verdict"))

    def _verdict(self, sealed: bytes) -> HangDecision | None:
        try:
            return HangDecision.model_validate_json(self._opened("verdict", sealed))
        except ValueError as error:
            log.warning("the verdict that the store holds is ignored: %s", error)
            return None

    def _sealed(self, what: str, text: str) -> str:
        return b64encode(seal(self._launch_key, f"watchdog {self._key} {what}", text.encode())).decode()

    def _opened(self, what: str, sealed: bytes) -> bytes:
        """The message that a node of the launch has written there. Raises ValueError for anything else."""
        most = MAX_BYTES * 4 // 3
        if len(sealed) > most:
            raise ValueError(f"{len(sealed)} bytes, where {most} are allowed")
        return unseal(self._launch_key, f"watchdog {self._key} {what}", b64decode(sealed, validate=True), MAX_BYTES)


def _packed(one: Watched) -> list[Any]:
    page, usual = one.seen, one.seen.usual
    steps = [] if usual is None else [usual, usual, max(page.steps)]  # with the same median and the same maximum
    return [
        page.rank,
        page.world,
        page.step,
        page.phase,
        page.waiting,
        page.requests,
        page.beats,
        steps,
        one.quiet,
        one.idle,
        one.stopped,
        page.allowed,
    ]


def _unpacked(packed: Sequence[Any], silent: float) -> Watched:
    rank, world, step, phase, waiting, requests, beats, steps, quiet, idle, stopped, allowed = packed
    page = Seen(rank, world, step, phase, waiting, requests, beats, tuple(steps), allowed)
    if silent >= SILENT:
        return Watched(page, quiet + silent, idle + silent, silent, unheard=True)
    return Watched(page, quiet + silent, idle + silent, stopped)
