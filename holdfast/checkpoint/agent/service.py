"""The checkpoint agent: takes the copies of its node's ranks from shared memory, makes them durable and commits them.

A rank that dies takes no complete copy with it. Writers that wait for its part learn when it will never come. A failure
of one writer does not affect another. The agent keeps no state that its replacement would miss: the ranks send
everything again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from holdfast.checkpoint.agent.buffers import SharedMemory, boxes_in
from holdfast.checkpoint.agent.protocol import (
    TICK_SECONDS,
    Connection,
    Drain,
    Drained,
    Lift,
    Listen,
    Lost,
    Memory,
    Message,
    ProtocolError,
    Save,
    Tick,
    Watch,
    Writer,
)
from holdfast.checkpoint.agent.store_writer import StoreWriter, TierCopies
from holdfast.checkpoint.agent.worker import SaveWorker, Work
from holdfast.checkpoint.local_tiers.peers import Server
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.checkpoint")

STEPS = 8  # newest steps of a gang whose writers are remembered


class Agent:
    """Serves the ranks of one node until it is drained."""

    def __init__(self, work_of: Callable[[Writer], Work]) -> None:
        self._work_of = work_of
        self._gangs: dict[tuple[str, int], _Gang] = {}  # by run and attempt
        self._savings: list[SaveWorker] = []
        self._connections: set[Connection] = set()  # the receivers of ticks
        self._ranks = 0  # connections of ranks that have not ended
        self._changed = threading.Condition()
        self._drained = threading.Event()

    def serve(self, path: Path) -> None:
        """Listen at `path` and serve until drained. Call it once."""
        path.unlink(missing_ok=True)  # left by an agent that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(64)
            for act in (lambda: self._accept(listener), self._tick):
                threading.Thread(target=act, daemon=True).start()
            self._drained.wait()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            end, _ = listener.accept()
            threading.Thread(target=self._follow, args=(Connection(end, None),), daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            with self._changed:
                connections = list(self._connections)
            for connection in connections:
                with suppress(OSError):
                    connection.offer(Tick())

    def _follow(self, connection: Connection) -> None:
        """Serve one connection until it ends."""
        with self._changed:
            self._connections.add(connection)
        rank: _Rank | None = None
        try:
            while True:
                message, descriptors = connection.receive()
                if isinstance(message, Writer) and rank is None:
                    rank = self._introduced(message, connection)
                elif isinstance(message, Drain):
                    connection.send(Drained(left=tuple(self._drain(message.seconds))))
                    self._drained.set()
                elif rank is not None:
                    rank.hear(message, descriptors)
                elif not isinstance(message, Watch):
                    raise ProtocolError(f"a {message.kind} was not expected")
                for descriptor in descriptors:
                    os.close(descriptor)
        except (EOFError, ConnectionResetError):
            pass
        except Exception:  # no thread may use memory that its rank believes to be free again
            log.exception("the message of %s is invalid: the checkpoint agent restarts", rank or "a process")
            os._exit(ExitCode.UNEXPECTED)
        finally:
            if rank is not None:
                rank.gone()
            with self._changed:
                self._connections.discard(connection)
                self._ranks -= rank is not None
                self._changed.notify_all()
            connection.close()

    def _introduced(self, writer: Writer, connection: Connection) -> _Rank:
        def tell(outcome: object) -> None:
            with suppress(OSError):  # the rank has died
                connection.send(outcome)  # type: ignore[arg-type]

        saving = SaveWorker(self._work_of(writer), tell, f"rank {writer.rank}", TierCopies.of(writer))
        with self._changed:
            for run_id, attempt in list(self._gangs):  # a gang that has formed anew follows the one before
                if run_id == writer.run_id and attempt < writer.attempt:
                    self._gangs.pop((run_id, attempt)).close()
            gang = self._gangs.setdefault((writer.run_id, writer.attempt), _Gang())
            self._savings = [active for active in self._savings if active.busy() or not active.closed] + [saving]
            self._ranks += 1
        return _Rank(writer, saving, gang)

    def _drain(self, seconds: float) -> list[str]:
        """Wait until no rank is connected and no work is left. Return what is not done in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._ranks == 0, seconds)
            savings = list(self._savings)
        for saving in savings:
            saving.hurry()
        for saving in savings:
            saving.finish(max(0.0, deadline - time.monotonic()))
        return [description for saving in savings for description in saving.busy()]


class _Gang:
    """The ranks of one attempt on this node: which steps they saved, and which ranks will save no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[int] = []  # the newest, oldest first
        self._here: dict[int, _Rank] = {}
        self._gone: dict[int, _Rank] = {}

    def add(self, rank: _Rank) -> None:
        with self._lock:
            self._here[rank.number] = rank
            self._gone.pop(rank.number, None)

    def saved(self, step: int) -> None:
        """Record that a rank has a complete copy of `step`. Ranks that have died will have none."""
        with self._lock:
            if step not in self._steps:
                self._steps = sorted([*self._steps, step])[-STEPS:]
                for rank in self._gone.values():
                    rank.give_up(step)

    def lose(self, rank: _Rank) -> None:
        """Handle the end of a rank, for any reason. Steps that other ranks have saved and this one has not will never
        be whole."""
        with self._lock:
            if self._here.get(rank.number) is not rank:
                return  # it is connected again already
            del self._here[rank.number]
            self._gone[rank.number] = rank
            for step in self._steps:
                rank.give_up(step)

    def close(self) -> None:
        """Another gang has formed: finish what these ranks handed over, and accept no more."""
        with self._lock:
            for rank in (*self._here.values(), *self._gone.values()):
                rank.close()


class _Rank:
    """One rank's connection."""

    def __init__(self, writer: Writer, saving: SaveWorker, gang: _Gang) -> None:
        self.number, self._writer, self._saving, self._gang = writer.rank, writer, saving, gang
        self._server: Server | None = None
        self._memory: dict[int, SharedMemory] = {}
        self._newest = -1
        gang.add(self)

    def __str__(self) -> str:
        return f"rank {self.number}"

    def hear(self, message: Message, descriptors: list[int]) -> None:
        """Handle a message of the rank. Takes over the descriptor that it needs. Raises ProtocolError, ValueError."""
        if isinstance(message, Memory) and len(descriptors) == 1:
            self._attach(message, descriptors.pop())
        elif isinstance(message, Listen) and len(descriptors) == 1 and self._server is None:
            listener = socket.socket(fileno=descriptors.pop())
            self._server = Server(listener, message.token, self._writer.run_id, self._writer.near)
        elif isinstance(message, Save):
            self._save(message)
        elif isinstance(message, Lift):
            self._saving.lift()
        elif isinstance(message, Lost):
            self._newest = max(self._newest, message.step)
            self._saving.give_up(message.step, message.reason)
        else:
            raise ProtocolError(f"a {message.kind} was not expected")

    def _attach(self, memory: Memory, descriptor: int) -> None:
        if (previous := self._memory.pop(memory.buffer, None)) is not None:
            previous.close()
        self._memory[memory.buffer] = SharedMemory(descriptor, memory.size)

    def _save(self, save: Save) -> None:
        boxes = None
        if save.buffer is not None:
            if save.buffer not in self._memory:
                raise ProtocolError(f"step {save.step} is in buffer {save.buffer}, which was not given")
            boxes = boxes_in(self._memory[save.buffer].bytes, save.slots)
        self._saving.save(save.request, boxes)
        if save.request.committed:  # no writer waits for another's part of a step that only local tiers keep
            self._newest = max(self._newest, save.step)
            self._gang.saved(save.step)

    def give_up(self, step: int) -> None:
        if step > self._newest:
            self._saving.give_up(step, f"step {step}: rank {self.number} ended before its state was copied")

    def close(self) -> None:
        self._saving.close()
        if self._server is not None:  # until then other nodes may have something to send
            self._server.close(listener=True)

    def gone(self) -> None:
        """Handle the end of the rank. What is complete is still made durable, from memory that this process holds as
        well."""
        self._gang.lose(self)
        for memory in self._memory.values():
            memory.close()
        self._memory = {}


def serve(path: Path) -> None:
    """Run the agent of this node at `path`, until drained."""
    torch.set_num_threads(1)  # each writer has its own thread
    with suppress(OSError):
        os.nice(NICENESS)
    Agent(StoreWriter.of).serve(path)


NICENESS = 10  # the ranks go first
