"""The rank's connection to the agent of its node.

Every save that was handed over gets an outcome, even if the agent fails. The node's wrapper replaces a dead agent, and
this client sends the new one every save without an outcome. If no agent starts, the saves fail as if the store were
unreachable. If an agent is connected but silent for too long, they fail as for a hung process.
"""

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

MOST_DEATHS = 8  # consecutive agent deaths after which a save fails
_PAUSE = 0.02  # seconds before the second try to connect; doubles
_LONGEST_PAUSE = 1.0


class AgentClient:
    """Hands saves to the agent. Its thread ends with `close` or with the process."""

    def __init__(self, path: str, writer: Writer, tell: Callable[[Outcome], None], patience: float = PATIENCE) -> None:
        """`tell` is called from a thread, once for each outcome. `patience`: seconds without an agent, or without a
        message from it, after which saves fail."""
        self._path, self._writer, self._tell, self._patience = path, writer, tell, patience
        self._lock = threading.Lock()  # guards the fields below; held while a message is sent
        self._connection: Connection | None = None
        self._memory: dict[int, SharedMemory] = {}
        self._listen: tuple[Listen, int] | None = None  # the message and the listener's descriptor
        self._open: dict[int, Save] = {}  # saves without a final outcome, by step
        self._lost: dict[int, Lost] = {}  # reported as lost, no failure outcome yet; by step
        self._wanted = threading.Event()  # a message to send, or the end
        self._closing = self._silent = False  # silent: it did not take what it was sent
        self._lifted = False
        self._deaths = 0  # agent deaths since an agent last ended a save
        self._thread = threading.Thread(target=self._follow, name="checkpoint agent", daemon=True)
        self._thread.start()

    def allocate(self, buffer: int, size: int) -> torch.Tensor:
        """Allocate memory for a buffer, shared with this agent and its replacements. Raises NoSpaceError."""
        memory = SharedMemory.create(size)
        with self._lock:
            if (previous := self._memory.get(buffer)) is not None:
                previous.close()
            self._memory[buffer] = memory
            self._say(Memory(buffer=buffer, size=size), memory.descriptor)
        return memory.bytes

    def save(self, save: Save) -> None:
        """Hand over a complete copy. Never fails: the result arrives as an outcome."""
        with self._lock:
            self._open[save.step] = save
            self._say(save)
        self._wanted.set()

    def lost(self, step: int, reason: str) -> None:
        """Report that no copy of a step will come, so that no writer waits for it."""
        with self._lock:
            self._lost[step] = Lost(step=step, reason=reason)
            self._say(self._lost[step])

    def listen(self, listener: socket.socket, token: str) -> None:
        """Let this agent, and each replacement, accept what other nodes send."""
        with self._lock:
            self._listen = Listen(token=token), listener.detach()
            self._say(*self._listen)

    def lift(self) -> None:
        """Remove the limit on uploads, because a caller waits."""
        with self._lock:
            self._lifted = True
            self._say(Lift())

    def settle(self) -> None:
        """Do nothing: only the agent does the work after a commit."""

    def close(self) -> None:
        """Disconnect once an agent has the pending saves; the agent continues with them."""
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
        """Send the message if an agent is connected. A later agent gets it on connection. The caller holds the lock."""
        if self._connection is None:
            return
        try:
            self._connection.send(message, descriptors)
        except OSError as error:  # the receiving thread sees it, and looks for the next agent
            self._silent |= isinstance(error, TimeoutError)
            self._connection.close()
            self._connection = None

    def _follow(self) -> None:
        since, pause = time.monotonic(), _PAUSE  # when an agent was last connected
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
                    self._fail(StoreUnreachableError, f"no checkpoint agent runs at {self._path}: {error}")
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
        """Fail all saves. A hung agent may wake up and read its buffers, which must not change any more."""
        self._silent = False
        self._fail(HungError, f"the checkpoint agent sent nothing for {self._patience:g} s")

    def _died(self) -> None:
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            log.warning("the checkpoint agent has died; the next one receives its pending work")
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
                return  # a previous agent reported it too
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
