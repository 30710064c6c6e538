"""Copies on another node: a node sends its memory tier to its neighbor, and a new gang fetches what it lacks.

Each node has one listener. Both ends of a connection prove that they know the node's token (`channel`). It is derived
from a token that the gang's ranks exchange and from the launch's key. Requests are bounded JSON, and only the run's
local-tier folders are read or written. Received data is trusted no more than data on a disk: its reader compares
digests. A client without the token holds a connection for at most two seconds, and loses it when others need it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Literal

import psutil
from pydantic import BaseModel, Field

from holdfast.checkpoint.index import MAX_INDEX_BYTES
from holdfast.checkpoint.local_tiers.channel import Channel
from holdfast.checkpoint.local_tiers.tier import Tier, require_room, touch
from holdfast.checkpoint.local_tiers.tier_writer import Step, prune, record_key
from holdfast.checkpoint.shard_writer import writer_name
from holdfast.collectives import Gang
from holdfast.runtime import sealing
from holdfast.spec.errors import DataError, HoldfastError, MissingError, StoreUnreachableError
from holdfast.store import layout

log = logging.getLogger("holdfast.checkpoint")

PAUSE_SECONDS = 30.0  # pause after a step that could not be sent
CONNECTIONS = 64  # limit of connections served concurrently
UNPROVEN = 64  # limit of connections whose other end has not yet proven that it knows the token
UNPROVEN_EACH = 16  # limit of such connections per address
_POLL_SECONDS = 0.2
_LOST = (OSError, EOFError, ValueError)  # raised by a channel that is no longer usable


class Endpoint(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """The address at which a node listens, and its token."""

    host: str
    port: int = Field(ge=1, lt=1 << 16)
    token: str = Field(repr=False)

    def keyed(self) -> Endpoint:
        """The endpoint with the final token, which also includes the launch's key if one is set."""
        key = os.environ.get(sealing.NEAR_VARIABLE)
        return self if not key else self.model_copy(update={"token": sealing.derive_key(key, f"near {self.token}")})


class _Request(BaseModel, extra="forbid", frozen=True):
    op: Literal["get", "put"]
    tier: str = Field(max_length=100)
    writer: int = Field(ge=0, lt=1 << 31)
    key: str = Field(max_length=1000)
    start: int = Field(default=0, ge=0, lt=1 << 62)
    size: int | None = Field(default=None, ge=0, le=MAX_INDEX_BYTES)  # bytes; None: all of the object


class _Answer(BaseModel, extra="forbid", frozen=True):
    size: int = Field(default=0, ge=0, le=MAX_INDEX_BYTES)  # bytes that follow
    error: str = ""
    missing: bool = False


class _Unproven:
    """The connections that have proven nothing yet. If there are too many, the oldest connection of the address with
    the most is ended. A client that knows the token passes immediately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, str] = {}  # oldest first

    def add(self, end: socket.socket, address: str) -> None:
        with self._lock:
            counts = Counter(self._ends.values())
            if counts[address] >= UNPROVEN_EACH:
                self._end_oldest(address)
            elif len(self._ends) >= UNPROVEN:
                self._end_oldest(counts.most_common(1)[0][0])
            self._ends[end] = address

    def remove(self, end: socket.socket) -> None:
        with self._lock:
            self._ends.pop(end, None)

    def _end_oldest(self, address: str) -> None:
        oldest = next(end for end, end_address in self._ends.items() if end_address == address)
        del self._ends[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it


def listen() -> tuple[socket.socket, Endpoint]:
    """A listener on the interface that connects this node to its peers, and its endpoint. Raises OSError."""
    host = _own_address()
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
    return listener, Endpoint(host=host, port=listener.getsockname()[1], token=secrets.token_hex(32))


def _own_address() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for address in psutil.net_if_addrs().get(name, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 0) or 9
    family, kind, *_, target = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing: the kernel reports the source address it would use
        probe.connect(target)
        return str(probe.getsockname()[0])


class Server:
    """Serves this node's copies of a run, and accepts the copies of its neighbor. Its threads end with `close`, which
    leaves the listener open, or with the process."""

    def __init__(self, listener: socket.socket, token: str, run_id: str, tiers: Sequence[Tier]) -> None:
        self._listener, self._token, self._run_id = listener, token, run_id
        self._tiers: dict[str, Tier] = {tier.name: tier for tier in tiers}
        self._unproven = _Unproven()
        self._room = threading.Semaphore(CONNECTIONS)
        self._closed = self._warned = False
        self._known = re.compile(rf"^runs/{re.escape(run_id)}/(indexes/[0-9-]+/[0-9a-z.]+|packs/[0-9a-f-]+\.pack)$")
        self._thread = threading.Thread(target=self._accept, name="near server", daemon=True)
        self._thread.start()

    def close(self, *, listener: bool = False) -> None:
        """Stop serving. With `listener`, close the listener too, so that no other process serves it."""
        self._closed = True
        self._thread.join()
        if listener:
            self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], _POLL_SECONDS)[0]:
                continue
            try:
                self._listener.setblocking(False)  # another process with the same listener may be faster
                end, address = self._listener.accept()
            except OSError:
                continue
            self._unproven.add(end, str(address[0]))
            threading.Thread(target=self._follow, args=(end,), name="near connection", daemon=True).start()

    def _follow(self, end: socket.socket) -> None:
        with end:
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel = Channel.accept(end, self._token)
            except _LOST as error:
                if not self._warned:
                    self._warned = True  # once: strangers must not fill the log
                    log.warning("a client without the token requested copies of run %s: %s", self._run_id, error)
                return
            finally:
                self._unproven.remove(end)
            if not self._room.acquire(blocking=False):
                return
            try:
                while not self._closed:
                    self._serve(channel, channel.hear(_Request, idle=True))
            except (*_LOST, HoldfastError) as error:
                log.debug("a connection for near copies has ended: %s", error)
            finally:
                self._room.release()

    def _serve(self, channel: Channel, request: _Request) -> None:
        tier, key = self._tiers.get(request.tier), request.key
        if not self._known.match(key):
            raise ValueError(f"{key[:200]!r} is no object of a near step")
        try:
            if tier is None:
                raise MissingError(f"this node has no {request.tier} tier")
            if request.op == "put":
                self._take(channel, tier, request)
                data = b""
            else:
                store = tier.store(request.writer)
                data = store.get(key) if request.size is None else store.get(key, request.start, request.size)
        except HoldfastError as error:
            channel.say(_Answer(error=str(error)[:1000], missing=isinstance(error, MissingError)))
            return
        channel.say(_Answer(size=len(data)))
        channel.send_bytes(data)

    def _take(self, channel: Channel, tier: Tier, request: _Request) -> None:
        """Store an object of another node. The index is the last object of a step: after it, older steps are
        removed."""
        size, store = request.size or 0, tier.store(request.writer)
        parts = channel.receive_bytes(size)
        try:
            require_room(tier, size)
            store.put_stream(request.key, size, lambda: parts)
        except HoldfastError:
            for _ in parts:  # read and discard the rest
                pass
            raise
        touch(tier.folder)
        if request.key.endswith(f"/{writer_name(request.writer)}.idx"):
            prune(store, self._run_id, request.writer)


class Nodes:
    """The nodes of a gang and their endpoints, as one rank sees them."""

    def __init__(self, gang: Gang, tiers: Sequence[Tier]) -> None:
        """Collective. `tiers`: those of this node, which is identified by its name and their folders."""
        self._gang = gang
        self.here = f"{socket.gethostname()} {' '.join(tier.folder for tier in tiers)}"
        self.names = gang.all_gather(self.here, str)  # by rank
        self.leads = self.names.index(self.here) == gang.rank  # this rank is the first one of its node
        self._listener: socket.socket | None = None
        own: Endpoint | None = None
        if self.leads and len(set(self.names)) > 1:
            try:
                self._listener, own = listen()
            except (OSError, ValueError) as error:
                log.warning("no other node can have copies of this one, or send any: %s", error)
        self._own = own and own.keyed()
        # By rank; set for the first rank of each node.
        endpoints: list[Endpoint | None] = gang.all_gather(own, Endpoint | None)
        self.endpoints = [endpoint and endpoint.keyed() for endpoint in endpoints]

    @property
    def neighbour(self) -> Endpoint | None:
        """The next listening node around the ring; None without another one."""
        ring = list(dict.fromkeys(self.names))
        at = ring.index(self.here)
        for name in [*ring[at + 1 :], *ring[:at]]:
            if (endpoint := self.endpoints[self.names.index(name)]) is not None:
                return endpoint
        return None

    @contextmanager
    def served(self, run_id: str, tiers: Sequence[Tier]) -> Iterator[None]:
        """Let other nodes read this node's copies, until all ranks have finished the body."""
        server = None
        if self._listener is not None and self._own is not None:
            server = Server(self._listener, self._own.token, run_id, tiers)
        try:
            yield
            self._gang.barrier()
        finally:
            if server is not None:
                server.close()

    def handed_over(self) -> tuple[socket.socket, str] | None:
        """The listener and its token, for the process that serves from now on. None on most ranks, and from the second
        call."""
        listener, self._listener = self._listener, None
        return None if listener is None or self._own is None else (listener, self._own.token)


class Remote:
    """One writer's part on another node: see `Source`. Several threads may read."""

    def __init__(self, endpoint: Endpoint, tier: str, writer: int) -> None:
        self._endpoint, self._tier, self._writer = endpoint, tier, writer
        self._idle: SimpleQueue[Channel] = SimpleQueue()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See Store. Raises MissingError, StoreUnreachableError."""
        with self._connected() as channel:
            channel.say(self._request("get", key, start=start, size=length))
            answer = channel.hear(_Answer)
            if not answer.error and length not in (None, answer.size):
                raise ValueError(f"{key}: {answer.size} bytes came, and {length} were requested")
            data = b"".join(channel.receive_bytes(answer.size))
        self._require_done(answer)
        return data

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See Store."""
        target.cast("B")[:] = self.get(key, start, target.nbytes)

    def put(self, key: str, data: bytes) -> None:
        """Store an object there. Raises StoreUnreachableError."""
        with self._connected() as channel:
            channel.say(self._request("put", key, size=len(data)))
            channel.send_bytes(data)
            answer = channel.hear(_Answer)
        self._require_done(answer)

    def close(self) -> None:
        """End its connections."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _request(self, op: Literal["get", "put"], key: str, *, start: int = 0, size: int | None) -> _Request:
        return _Request(op=op, tier=self._tier, writer=self._writer, key=key, start=start, size=size)

    def _require_done(self, answer: _Answer) -> None:
        if answer.error:
            kind = MissingError if answer.missing else StoreUnreachableError
            raise kind(f"{self._endpoint.host}: {answer.error}")

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        """A connection, which is reused after success."""
        try:
            try:
                channel = self._idle.get_nowait()
            except Empty:
                channel = Channel.connect(self._endpoint.host, self._endpoint.port, self._endpoint.token)
            try:
                yield channel
            except BaseException:
                channel.close()
                raise
            self._idle.put(channel)
        except (*_LOST, DataError) as error:
            raise StoreUnreachableError(
                f"the copies on {self._endpoint.host}:{self._endpoint.port} cannot be reached: {error}"
            ) from error


class Neighbour:
    """Sends one writer's copies to another node, step by step. Failures are logged, and sending pauses for a while."""

    def __init__(self, endpoint: Endpoint, tier: Tier, run_id: str, writer: int) -> None:
        self._remote, self._tier, self._run_id, self._writer = Remote(endpoint, tier.name, writer), tier, run_id, writer
        self._not_before = 0.0

    def send(self, step: Step) -> None:
        """Send a step that is complete here: packs and record first, the index last."""
        if time.monotonic() < self._not_before:
            return
        store = self._tier.store(self._writer)
        index = f"{layout.indexes(self._run_id, *step)}{writer_name(self._writer)}.idx"
        keys = [info.key for info in store.list(f"{layout.packs(self._run_id)}{step[0]:06d}-{step[1]:09d}-")]
        if store.stat(record := record_key(self._run_id, *step)) is not None:
            keys.append(record)
        try:
            for key in [*keys, index]:
                self._remote.put(key, store.get(key))
        except HoldfastError as error:
            self._not_before = time.monotonic() + PAUSE_SECONDS
            log.warning("step %d of writer %d is on this node alone: %s", step[1], self._writer, error)
