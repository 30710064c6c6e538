"""Watchdog of a node: observes ranks from outside, detects a hang, keeps stacks and ends the gang.

It runs in the process that supervises the ranks, and needs only a rank's heartbeat page (`runtime.heartbeat`). So it
also sees a rank that is stopped, or stuck in C with Python's lock held. Time counts only while this process itself gets
CPU time, so a machine that sleeps or is overloaded causes no hang.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.launch.exits import RankExit
from holdfast.launch.node.hang_consensus import HangConsensus, HangDecision
from holdfast.launch.node.hangs import ACROSS_NODES, Hang, Watched, judge
from holdfast.launch.node.output import NodeEvents
from holdfast.launch.node.stacks import STARVED_SECONDS, WORKING, has_working_child, stacks_of, states_of
from holdfast.runtime.heartbeat import SUFFIX, HeartbeatReader
from holdfast.runtime.node import node_name
from holdfast.spec.errors import ExitCode
from holdfast.telemetry.events import HangDetected
from holdfast.telemetry.phases import PHASES

TICK = 0.1  # seconds between two polls
LOOK_AFTER = 0.2  # seconds without a mark before the kernel is queried about a rank
ASK_SECONDS = 1.0  # between two polls of the other nodes, while no rank is quiet
REAP_TIMEOUT = 5.0  # for a rank that was killed
ALONE_SECONDS = 15.0  # seconds without other nodes after they were unreachable; well below the time they wait

log = logging.getLogger("holdfast.launch")


@dataclass
class _Rank:
    rank: int
    pid: int
    pidfd: int | None
    reader: HeartbeatReader | None = None
    beats: int = -1
    quiet: float = 0.0
    idle: float = 0.0
    stopped: float = 0.0
    ended: bool = False  # by this watchdog

    def gone(self) -> bool:
        """Whether it has ended. Closes its descriptor then."""
        if self.pidfd is None:
            return not Path(f"/proc/{self.pid}").exists()
        if not select.select([self.pidfd], [], [], 0.0)[0]:
            return False
        os.close(self.pidfd)
        return True

    def await_end(self, seconds: float) -> None:
        """Wait at most `seconds` until the kernel has released it. Does not wait without a descriptor."""
        if self.pidfd is not None:
            select.select([self.pidfd], [], [], seconds)

    def send(self, number: int) -> None:
        """Send a signal, never to another process that has reused its id."""
        with suppress(ProcessLookupError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)


class Watchdog:
    """Watches the ranks that this process starts, in a separate thread."""

    def __init__(
        self,
        events: NodeEvents,
        folder: Path,
        keep: Callable[[int, bytes], None],
        tick: float = TICK,
        launch_key: str = "",
    ) -> None:
        """`events` receives a hang. `folder` has the ranks' own records. `keep` adds a text to the log of a process."""
        self._events, self._folder, self._keep, self._tick = events, folder, keep, tick
        self._ranks: list[_Rank] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._words = ""
        self._environment: Mapping[str, str] = {}  # of the newest rank
        self._launch_key = launch_key
        self._consensus: HangConsensus | None = None
        self._consensus_of: Mapping[str, str] = {}
        self._exchanged_at = 0.0  # when the other nodes were last queried, in monotonic seconds

    def follow(self, environment: Mapping[str, str], pid: int) -> None:
        """Watch process `pid` once it has a heartbeat page. Its `environment` names its rank."""
        pidfd = None
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
        with self._lock:
            self._ranks.append(_Rank(int(environment["RANK"]), pid, pidfd))
            self._environment = environment
            self._words = ""  # a hang before it is over: the gang continues in place
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()

    def close(self) -> str:
        """Stop watching, after the ranks have ended. Returns the description of the hang that ended them, or an empty
        string."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(STARVED_SECONDS + 10.0)
            if not self._thread.is_alive():
                self._say_gone()
        with self._lock:
            for rank in self._ranks:
                if not rank.gone() and rank.pidfd is not None:
                    os.close(rank.pidfd)
            self._ranks.clear()
        return self._words

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(self._tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._tick), now
            with self._lock:
                self._ranks = [rank for rank in self._ranks if not rank.gone()]
                ranks = [rank for rank in self._ranks if not rank.ended]
                environment = self._environment
            if not ranks:
                self._say_gone()
                continue
            try:
                states = [rank for watched_rank in ranks if (rank := self._look(watched_rank, passed)) is not None]
                if len(states) == len(ranks) and (verdict := self._verdict(states, environment, now)) is not None:
                    self._end(verdict, ranks)
            except Exception:  # the watchdog must not end a training
                log.exception("the watchdog is blind for a moment: please report it with this traceback")

    def _verdict(self, seen: Sequence[Watched], environment: Mapping[str, str], now: float) -> HangDecision | None:
        """The verdict on a hang, here or on another node; None without one."""
        states = [(node_name(), rank) for rank in seen]
        if seen and HangConsensus.is_for(environment):
            try:
                return self._agreed(states, environment, now)
            except RuntimeError as error:  # raised by torch's store
                log.debug("the watchdogs of the other nodes cannot be reached: %s", error)
                self._consensus, self._exchanged_at = None, now + ALONE_SECONDS
        hang = judge(seen)
        return None if hang is None else _decision_of(hang, states)

    def _agreed(
        self, known: Sequence[tuple[str, Watched]], environment: Mapping[str, str], now: float
    ) -> HangDecision | None:
        quiet = any(rank.quiet > LOOK_AFTER for _, rank in known)
        if now < self._exchanged_at + (self._tick if quiet else ASK_SECONDS):
            hang = judge([rank for _, rank in known]) if self._consensus is None else None
            return None if hang is None else _decision_of(hang, known)
        if self._consensus is None or self._consensus_of != environment:
            self._consensus, self._consensus_of, self._exchanged_at = (
                HangConsensus(environment, self._launch_key),
                environment,
                now,
            )
        passed, self._exchanged_at = min(now - self._exchanged_at, 2 * ASK_SECONDS), now
        known = self._consensus.exchange([rank for _, rank in known], passed)
        if (verdict := self._consensus.verdict()) is not None:
            return verdict
        hang = judge([rank for _, rank in known], ACROSS_NODES)
        return None if hang is None else self._consensus.decide(_decision_of(hang, known))

    def _say_gone(self) -> None:
        """Report to the other nodes that no ranks are left here, so that they expect no more messages."""
        board, self._consensus = self._consensus, None
        if board is not None:
            with suppress(RuntimeError):
                board.exchange([], 0.0)

    def _look(self, one: _Rank, passed: float) -> Watched | None:
        """The state of a rank; None if it has no heartbeat page yet, or the kernel reports nothing about it."""
        if one.reader is None:
            try:
                one.reader = HeartbeatReader(self._folder / f"{one.pid}{SUFFIX}")
            except (OSError, ValueError):
                return None
        page = one.reader.read()
        if page.beats != one.beats:
            one.beats, one.quiet, one.idle, one.stopped = page.beats, 0.0, 0.0, 0.0
            return Watched(page, 0.0)
        one.quiet += passed
        if one.quiet <= LOOK_AFTER:
            one.idle += passed
        else:
            states = states_of(one.pid)
            if (main := next(states, None)) is None:
                return None
            one.stopped = one.stopped + passed if main in "Tt" else 0.0
            if main not in WORKING and WORKING.isdisjoint(states) and not has_working_child(one.pid):
                one.idle += passed
        return Watched(page, one.quiet, one.idle, one.stopped)

    def _end(self, verdict: HangDecision, ranks: list[_Rank]) -> None:
        self._words = verdict.words
        for rank in ranks:  # ranks that start later are watched like any others
            rank.ended = True
        log.error("%s. The ranks of this node are ended, to begin again", verdict.words)
        suspects = [rank for rank in ranks if rank.rank in verdict.suspects]
        self._tell(suspects, verdict)
        self._keep_stacks(ranks)
        if self._consensus is not None:
            with suppress(RuntimeError):
                self._consensus.together()
        for rank in ranks:
            rank.send(signal.SIGKILL)
        for rank in ranks:  # a rank's record says that nothing of it is left
            rank.await_end(REAP_TIMEOUT)
        blames = verdict.nodes == 1 and bool(suspects) and int(self._environment.get("GROUP_WORLD_SIZE", "1")) > 1
        for rank in ranks:
            code = ExitCode.HUNG if rank in suspects else ExitCode.LOST_PEER
            self._write_exit(rank, code, blames_node=blames and rank in suspects)

    def _tell(self, mine: list[_Rank], verdict: HangDecision) -> None:
        if not mine:  # the node that has a suspect reports it
            return
        assert mine[0].reader is not None, "it was seen"
        suspect = Watched(mine[0].reader.read(), mine[0].quiet)
        self._events.tell(
            HangDetected(
                rank=suspect.seen.rank,
                host=node_name(),
                phase=suspect.phase,
                step=suspect.step,
                seconds=suspect.quiet,
                message=verdict.words,
            )
        )

    def _keep_stacks(self, ranks: list[_Rank]) -> None:
        """Add the stacks of each rank to its log. A stopped process writes none."""
        stacks = stacks_of(self._folder, {rank.pid: rank.send for rank in ranks if not rank.stopped})
        for rank in ranks:
            page = rank.reader.read() if rank.reader is not None else None
            place = f"in the phase {PHASES[page.phase]} after step {page.step}" if page else "before it had a place"
            text = f"[holdfast: {self._words}. Rank {rank.rank} was {place}; its stacks:]\n".encode()
            self._keep(rank.pid, text + (stacks.get(rank.pid) or b"  none: it does not answer\n"))

    def _write_exit(self, one: _Rank, code: ExitCode, *, blames_node: bool) -> None:
        """Complete the rank's record, since the rank cannot."""
        path = self._folder / f"{one.pid}.json"
        with suppress(OSError, ValueError):
            record = RankExit.model_validate_json(path.read_text())
            update = {"code": int(code), "ended": time.time(), "blames_node": blames_node}
            path.write_text(record.model_copy(update=update).model_dump_json())


def _decision_of(hang: Hang, known: Sequence[tuple[str, Watched]]) -> HangDecision:
    nodes = list(dict.fromkeys(node for node, rank in known if rank in hang.suspects))
    suspects = frozenset(rank.seen.rank for rank in hang.suspects)
    return HangDecision(words=hang.words(", ".join(nodes)), suspects=suspects, nodes=len(nodes))
