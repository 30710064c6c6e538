"""A rank's end of the connection to the agent of its node.

Promises that every save that was handed over gets an outcome, whatever becomes of the agent: one that has died is
followed by another (the node's wrapper sees to it), which is told everything that had no outcome yet. Where none comes,
the saves fail as they do when the store is away; where one is there and says nothing for too long, as those of a hung
process do.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import torch

from holdfast.checkpoint.agent.buffers import SharedMemory
from holdfast.checkpoint.agent.protocol import (
    PATIENCE,
    Connection,
    Lift,
    Listen,
    Lost,
    Memory,
    Outcome,
    ProtocolError,
    Save,
    Tick,
    Writer,
)
from holdfast.spec.errors import HoldfastError, HungError, StoreUnreachableError

log = logging.getLogger("holdfast.checkpoint")

MOST_DEATHS = 8  # of agents in a row, until a save fails
_PAUSE = 0.02  # seconds before the second try to connect; doubles
_LONGEST_PAUSE = 1.0


class AgentClient:
    """Hands saves to the agent. Its thread ends with `close` or with the process."""

    def __init__(self, path: str, writer: Writer, tell: Callable[[Outcome], None], patience: float = PATIENCE) -> None:
        """`tell` is called from a thread, with each outcome once. `patience`: seconds without an agent, or without a
        word of it, after which saves fail."""
        self._path, self._writer, self._tell, self._patience = path, writer, tell, patience
        self._lock = threading.Lock()  # of what follows; held while a message is sent
        self._connection: Connection | None = None
        self._memory: dict[int, SharedMemory] = {}
        self._listen: tuple[Listen, int] | None = None  # and the listener's descriptor
        self._open: dict[int, Save] = {}  # without a last outcome, by step
        self._lost: dict[int, Lost] = {}  # what was said of steps whose failure nobody has told yet
        self._wanted = threading.Event()  # something to say, or the end
        self._closing = self._silent = False  # silent: it did not take what it was sent
        self._lifted = False
        self._deaths = 0  # of agents, since one of them ended a save
        self._thread = threading.Thread(target=self._follow, name="checkpoint agent", daemon=True)
        self._thread.start()

    def allocate(self, buffer: int, size: int) -> torch.Tensor:
        """New memory for a buffer, shared with this agent and with each that follows it. Raises NoSpaceError."""
        memory = SharedMemory.create(size)
        with self._lock:
            if (former := self._memory.get(buffer)) is not None:
                former.close()
            self._memory[buffer] = memory
            self._say(Memory(buffer=buffer, size=size), memory.descriptor)
        return memory.bytes

    def save(self, save: Save) -> None:
        """Hand over a complete copy. Never fails: what becomes of it is an outcome."""
        with self._lock:
            self._open[save.step] = save
            self._say(save)
        self._wanted.set()

    def lost(self, step: int, reason: str) -> None:
        """Say that there will be no copy of a step, so that nobody waits for it."""
        with self._lock:
            self._lost[step] = Lost(step=step, reason=reason)
            self._say(self._lost[step])

    def listen(self, listener: socket.socket, token: str) -> None:
        """Have what other nodes send taken, by this agent and each that follows it."""
        with self._lock:
            self._listen = Listen(token=token), listener.detach()
            self._say(*self._listen)

    def lift(self) -> None:
        """Somebody waits: uploads are not held back any more."""
        with self._lock:
            self._lifted = True
            self._say(Lift())

    def settle(self) -> None:
        """What follows a commit is the agent's alone."""

    def close(self) -> None:
        """Leave, once an agent has been given what there is to save: it goes on with it."""
        deadline = time.monotonic() + self._patience
        while self._connection is None and self._open and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        with self._lock:
            self._closing = True
            if self._connection is not None:
                self._connection.close()
        self._wanted.set()
        self._thread.join(self._patience)

    def _say(self, message: Memory | Listen | Save | Lift | Lost, *descriptors: int) -> None:
        """Send it if somebody is there; who comes later is told anyway. The lock is held."""
        if self._connection is None:
            return
        try:
            self._connection.send(message, descriptors)
        except OSError as error:  # the thread that receives sees it, and looks for the next agent
            self._silent |= isinstance(error, TimeoutError)
            self._connection.close()
            self._connection = None

    def _follow(self) -> None:
        since, pause = time.monotonic(), _PAUSE  # when an agent was last there
        while not self._closing:
            try:
                connection = self._connected()
            except TimeoutError:
                self._hung()
                since = time.monotonic()
                continue
            except OSError as error:
                if time.monotonic() - since > self._patience:
                    self._wanted.clear()
                    self._fail(StoreUnreachableError, f"no checkpoint agent is there at {self._path}: {error}")
                    self._wanted.wait()  # until there is a save again
                    since = time.monotonic()
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            pause = _PAUSE
            try:
                while True:
                    message, _ = connection.receive()
                    if isinstance(message, Outcome):
                        self._ended(message)
                    elif not isinstance(message, Tick):
                        raise ProtocolError(f"a {message.kind} was not expected")
            except (EOFError, OSError) as error:
                with self._lock:
                    self._connection = None
                connection.close()
                if isinstance(error, TimeoutError) or self._silent:
                    self._hung()
                elif not self._closing:
                    self._died()
            since = time.monotonic()

    def _hung(self) -> None:
        """It may wake up and read its buffers, which must not change any more."""
        self._silent = False
        self._fail(HungError, f"the checkpoint agent said nothing for {self._patience:g} s")

    def _died(self) -> None:
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            log.warning("the checkpoint agent has died; the next one is told what it was doing")
        else:
            self._fail(StoreUnreachableError, f"the checkpoint agent has died {self._deaths} times in a row")

    def _connected(self) -> Connection:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(self._patience)
            end.connect(self._path)
            connection = Connection(end, self._patience)
            with self._lock:
                connection.send(self._writer)
                for buffer, memory in self._memory.items():
                    connection.send(Memory(buffer=buffer, size=memory.size), [memory.descriptor])
                if self._listen is not None:
                    connection.send(self._listen[0], [self._listen[1]])
                if self._lifted:
                    connection.send(Lift())
                for step in sorted(self._open):
                    connection.send(self._open[step])
                for step in sorted(self._lost):
                    connection.send(self._lost[step])
                self._connection = None if self._closing else connection
        except OSError:
            end.close()
            raise
        return connection

    def _ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._lost.pop(outcome.step, None)
            save = self._open.get(outcome.step)
            if save is None and outcome.what != "failed":
                return  # told by an agent before, too
            if save is not None and outcome.what == "durable":
                if save.buffer is None:
                    return
                self._open[outcome.step] = save.model_copy(update={"buffer": None, "slots": ()})
            else:
                self._open.pop(outcome.step, None)
                self._deaths = 0
        self._tell(outcome)

    def _fail(self, error: type[HoldfastError], why: str) -> None:
        with self._lock:
            steps = sorted(self._open)
            self._open.clear()
        for step in steps:
            self._tell(Outcome(step=step, what="failed", error=error.__name__, reason=f"step {step}: {why}"))
