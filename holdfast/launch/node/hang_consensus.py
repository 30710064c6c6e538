"""What the watchdogs of a gang's nodes tell each other: which of the ranks all others wait for, wherever it is.

It goes over the TCP store by which the ranks have met, which torchrun hosts on the first node, beside its ranks. What
stands there is sealed with the key of the launch: whatever no node of it has written counts as nothing. Every operation
ends within SECONDS. Promises that all nodes act on the same verdict, the first one; and that a node which can
ask nobody goes on by itself.
"""

from __future__ import annotations

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast.launch.node.hangs import Watched
from holdfast.runtime.heartbeat import Seen
from holdfast.runtime.node import node_name
from holdfast.runtime.sealing import seal, unseal

log = logging.getLogger("holdfast.launch")

SECONDS = 5.0  # for one operation
TOGETHER = 4.0  # for the stacks of all nodes
MAX_BYTES = 1 << 20  # of what a node tells
SILENT = 10.0  # seconds after which a node that has told nothing new counts as stopped


class HangDecision(BaseModel):
    """What is said of a hang, and of whom."""

    model_config = ConfigDict(frozen=True)

    words: str
    suspects: frozenset[int]  # ranks
    nodes: int  # that suspects are on


class HangConsensus:
    """This node's connection. One thread uses it."""

    def __init__(self, environment: Mapping[str, str], launch_key: str = "") -> None:
        """`environment` is that of a rank. Raises RuntimeError where nobody answers."""
        from torch.distributed import TCPStore

        self._node, self._nodes = int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
        self._key = (
            f"holdfast/watchdog/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{environment['WORLD_SIZE']}"
        )
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SECONDS))
        self._launch_key, self._told = launch_key, 0
        self._heard: dict[int, tuple[int, float]] = {}  # of each node: what it told last, and for how long nothing new

    @staticmethod
    def is_for(environment: Mapping[str, str]) -> bool:
        """Whether there are other nodes, and a store that outlives a rank."""
        several = int(environment.get("GROUP_WORLD_SIZE", "1")) > 1
        return several and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def exchange(self, mine: Sequence[Watched], passed: float) -> list[tuple[str, Watched]]:
        """Tell the others of this node's ranks; the node and what is seen of every rank that is known, these included.
        `passed`: seconds since the last time. Raises RuntimeError where nobody answers."""
        self._told += 1
        own = {"told": self._told, "node": node_name(), "ranks": [_packed(one) for one in mine]}
        self._store.set(f"{self._key}/{self._node}", self._sealed(str(self._node), json.dumps(own)))
        others = [node for node in range(self._nodes) if node != self._node]
        keys = [f"{self._key}/{node}" for node in others]
        found = [(node_name(), one) for one in mine]
        if not self._store.check(keys):  # some have not begun
            return found
        for node, said in zip(others, self._store.multi_get(keys), strict=True):
            try:
                told = json.loads(self._opened(str(node), said))
            except ValueError as error:
                log.warning("what the store holds for node %d is ignored: %s", node, error)
                continue
            before, silent = self._heard.get(node, (0, 0.0))
            silent = silent + passed if told["told"] == before else 0.0
            self._heard[node] = (told["told"], silent)
            found += [(told["node"], _unpacked(one, silent)) for one in told["ranks"]]
        return found

    def decide(self, verdict: HangDecision) -> HangDecision:
        """The verdict that counts: this one, or an earlier one of another node. Raises RuntimeError where nobody
        answers."""
        offered = self._sealed("verdict", verdict.model_dump_json())
        return self._verdict(self._store.compare_set(f"{self._key}/verdict", "", offered)) or verdict

    def together(self) -> None:
        """Wait for all nodes to have done what they do before they end their ranks: a rank whose peer has ended leaves,
        and says nothing any more. Not for long: a node may be silent. Raises RuntimeError where nobody answers."""
        self._store.set(f"{self._key}/ready/{self._node}", "")
        deadline = time.monotonic() + TOGETHER
        while not self._store.check([f"{self._key}/ready/{node}" for node in range(self._nodes)]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def verdict(self) -> HangDecision | None:
        """What another node has decided. Raises RuntimeError where nobody answers."""
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
        """What a node of the launch has written there. Raises ValueError for anything else."""
        most = MAX_BYTES * 4 // 3
        if len(sealed) > most:
            raise ValueError(f"{len(sealed)} bytes, where {most} are allowed")
        return unseal(self._launch_key, f"watchdog {self._key} {what}", b64decode(sealed, validate=True), MAX_BYTES)


def _packed(one: Watched) -> list[Any]:
    seen, usual = one.seen, one.seen.usual
    steps = [] if usual is None else [usual, usual, max(seen.steps)]  # with the same median, and the same longest
    return [
        seen.rank, seen.world, seen.step, seen.phase, seen.waiting, seen.requests, seen.beats, steps,
        one.quiet, one.idle, one.stopped,
    ]  # fmt: skip


def _unpacked(told: Sequence[Any], silent: float) -> Watched:
    rank, world, step, phase, waiting, requests, beats, steps, quiet, idle, stopped = told
    seen = Seen(rank, world, step, phase, waiting, requests, beats, tuple(steps))
    if silent >= SILENT:
        return Watched(seen, quiet + silent, idle + silent, silent, unheard=True)
    return Watched(seen, quiet + silent, idle + silent, stopped)
