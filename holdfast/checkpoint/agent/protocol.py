"""Messages between a rank, the node's wrapper and the agent: bounded JSON over a Unix socket, never pickle.

A message is its length and one JSON object with a `kind`. The memory of a buffer travels with it as a file descriptor.
Both ends validate what they read. An invalid message ends the connection.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.local_tiers.peers import Endpoint
from holdfast.checkpoint.local_tiers.tier import Tier
from holdfast.checkpoint.retention import Retention
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.plan import Plan, Segment, continued

VARIABLE = "HOLDFAST_CHECKPOINT_AGENT"  # the path of the agent's socket on this node; unset without an agent
BUFFERS = 2  # per rank: one is written to the store while the other is filled
PATIENCE = 60.0  # seconds without a message after which the other end counts as gone
TICK_SECONDS = 1.0  # interval of an idle agent's messages
MAX_MESSAGE = 1 << 26  # bytes: a table of some 400,000 boxes
ROOM = 1 << 24  # bytes of MAX_MESSAGE for the rest of a save: metrics since the previous one
_LENGTH = struct.Struct("<I")


class SaveRequest(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """One save of one writer. The rank makes it. It travels unchanged to the process that makes the copy durable."""

    step: int = Field(ge=0)
    scalars: dict[str, int | float] = {}
    attachments: dict[str, str] = {}  # objects to be written just before the commit: key -> text
    tiers: tuple[str, ...] = ()  # the names of the local tiers that keep it
    committed: bool = True  # whether it becomes a checkpoint
    digest: StateDigest | None = None  # of the writer's boxes, where it is known

    def with_digest(self, digest: StateDigest | None) -> SaveRequest:
        """This request with the digest of the boxes."""
        return self.model_copy(update={"digest": digest})


class _Message(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """A message between a rank and the agent."""


class Writer(_Message):
    """Introduction of a rank: everything that is needed to make its saves durable and to commit them."""

    kind: Literal["writer"] = "writer"
    store: str  # URL
    run_id: str
    attempt: int = Field(ge=0)
    launch: int = Field(ge=0)
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    local_ranks: int = Field(1, ge=1)  # ranks on this node, this one included
    describe: dict[str, Any] = {}  # fields of the manifest that do not change
    plan: Plan | None = None
    segments: tuple[Segment, ...] = ()  # those of the loaded checkpoint
    history: tuple[tuple[int, int], ...] = ()  # that of the loaded checkpoint
    start: int = Field(0, ge=0)  # step of the loaded checkpoint
    root: int | None = Field(None, ge=0)  # step of the newest checkpoint, where `start` is a local-tier step
    same_bits: bool = True  # whether another attempt must have committed the same for a step
    retention: Retention = Retention(1)
    compress: bool = False  # lossless, where it saves space
    upload_rate: float | None = Field(None, gt=0)  # bytes a second
    near: tuple[Tier, ...] = ()  # the local tiers
    neighbour: Endpoint | None = None  # the node that also keeps the memory tier

    @property
    def lineage(self) -> dict[str, Any]:
        """The segments and the history of what it saves, as a manifest has them."""
        segments = self.segments
        if self.plan is not None:
            segments = continued(segments, self.start, self.attempt, self.plan)
        return {"segments": segments, "history": (*self.history, (self.start, self.attempt))}


class Memory(_Message):
    """A buffer of a rank. Its descriptor comes with the message."""

    kind: Literal["memory"] = "memory"
    buffer: int = Field(ge=0, lt=BUFFERS)
    size: int = Field(ge=1)  # bytes


class Listen(_Message):
    """Accept what another node sends. The listener's descriptor comes with the message."""

    kind: Literal["listen"] = "listen"
    token: str = Field(repr=False)


class Slot(_Message):
    """Position of a box in a buffer."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int = Field(ge=0)  # bytes into the buffer


class Save(_Message):
    """A copy is complete. Make it durable, and commit it if this writer leads others; or keep it in local tiers; or
    both."""

    kind: Literal["save"] = "save"
    request: SaveRequest
    buffer: int | None = Field(ge=0, lt=BUFFERS)  # None: a previous agent has made it durable
    slots: tuple[Slot, ...] = ()

    @property
    def step(self) -> int:
        """The step of the request."""
        return self.request.step


class Lift(_Message):
    """A caller waits for the saves: stop limiting uploads."""

    kind: Literal["lift"] = "lift"


class Lost(_Message):
    """No copy of this step exists, and none will come."""

    kind: Literal["lost"] = "lost"
    step: int = Field(ge=0)
    reason: str


class Outcome(_Message):
    """The result of a save. `durable`: its buffer is free. `done`: no work is left; from rank 0, it is committed.
    `failed`: neither will happen; or, after `done`, this attempt has been replaced."""

    kind: Literal["outcome"] = "outcome"
    step: int
    what: Literal["durable", "done", "failed"]
    error: str = ""  # class name of the failure
    reason: str = ""  # message of the failure
    bytes: int | None = None  # bytes written for a commit


class Tick(_Message):
    """The agent is alive."""

    kind: Literal["tick"] = "tick"


class Watch(_Message):
    """The node's wrapper subscribes to the agent's ticks."""

    kind: Literal["watch"] = "watch"


class Drain(_Message):
    """No rank will send anything more: finish what is complete, within `seconds`."""

    kind: Literal["drain"] = "drain"
    seconds: float = Field(ge=0)


class Drained(_Message):
    """What was complete is committed, or has failed. `left` describes what is not finished."""

    kind: Literal["drained"] = "drained"
    left: tuple[str, ...] = ()


Message = Writer | Memory | Listen | Save | Lift | Lost | Outcome | Tick | Watch | Drain | Drained
_READER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class ProtocolError(OSError):
    """The other end sent something that is no message."""


def require_small(save: Save, room: int = 0) -> None:
    """Raises SpecError for a save that no message can hold, with `room` bytes for the parts that are not known yet.
    Sending it would break the connection every time."""
    size = len(save.model_dump_json())
    if size + room > MAX_MESSAGE:
        sizes = f"their description takes {size:,} bytes" + (f", and metrics up to {room:,}" if room else "")
        remedy = "spread the state over more ranks, so that each saves fewer boxes, or save more often"
        message = f"{sizes}: more than the {MAX_MESSAGE:,} that the checkpoint agent takes in one message"
        raise SpecError([Problem("parallel", f"{len(save.slots):,} boxes of a rank", message, remedy)], "checkpoint")


class Connection:
    """One end of a connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket, patience: float | None = PATIENCE) -> None:
        """`patience`: seconds that a `send` or a `receive` may wait; None: no limit."""
        self._socket, self._sending = end, threading.Lock()
        end.settimeout(patience)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError (TimeoutError, BrokenPipeError) when the other end does not take it. The connection is then
        unusable."""
        data = message.model_dump_json(exclude_defaults=False).encode()
        if len(data) > MAX_MESSAGE:
            raise ProtocolError(f"a {message.kind} of {len(data)} bytes is larger than {MAX_MESSAGE}")
        with self._sending:
            head = _LENGTH.pack(len(data))
            count = socket.send_fds(self._socket, [head], list(descriptors)) if descriptors else 0
            self._socket.sendall(head[count:] + data)

    def offer(self, message: Message) -> None:
        """Send a small message without waiting. Drop it if the other end is slow to read."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            data = message.model_dump_json().encode()
            with suppress(BlockingIOError):
                self._socket.send(_LENGTH.pack(len(data)) + data, socket.MSG_DONTWAIT)
        finally:
            self._sending.release()

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which the caller then owns. Raises EOFError at the end, ProtocolError,
        and OSError (TimeoutError)."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, BUFFERS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not head:
                raise EOFError
            (length,) = _LENGTH.unpack(head + self._exactly(_LENGTH.size - len(head)))
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message of {length} bytes is larger than {MAX_MESSAGE}")
            return _READER.validate_json(self._exactly(length)), list(descriptors)
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, ValidationError):
                raise ProtocolError(f"not a message: {error}") from None
            raise

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if not (received := self._socket.recv_into(view)):
                raise EOFError
            view = view[received:]
        return bytes(data)

    def close(self) -> None:
        """End the connection. The other end reads what was sent, and then the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
