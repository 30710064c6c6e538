"""An authenticated connection between two nodes: each proves that it knows the same token.

The listening side sends 32 random bytes (S). The client answers with 32 random bytes (C) and an HMAC of both. The
listener proves itself by another HMAC of them. After that, an HMAC follows each message, and each chunk of the bytes
after it. It covers direction, number and content, under a key of this connection alone. Data from a peer without the
token is refused before it is parsed or kept. So is data that was changed, repeated or reordered in transit. Every
exchange has one deadline for all of it, however slowly its bytes arrive.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import TypeVar

from pydantic import BaseModel

from holdfast.spec.json_parsing import parse_json

HANDSHAKE_SECONDS = 2.0
SECONDS = 30.0  # limit for one message; bytes after it have as long again, and a second per LEAST_RATE bytes
LEAST_RATE = 1 << 20  # bytes a second
MAX_MESSAGE = 1 << 16  # bytes
CHUNK = 1 << 20  # bytes per check
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_RANDOM = 32  # bytes
_MAC = 32  # bytes
_HASH = "sha256"
M = TypeVar("M", bound=BaseModel)


class Channel:
    """One end of a connection, after the handshake. Sending and receiving raise OSError, EOFError or ValueError when
    the connection is no longer usable, and DataError for an invalid message."""

    def __init__(self, end: socket.socket, key: bytes, *, listens: bool) -> None:
        self._end, self._key = end, key
        self._ours, self._theirs = (b"<", b">") if listens else (b">", b"<")
        self._sent = self._received = 0

    @classmethod
    def accept(cls, end: socket.socket, token: str) -> Channel:
        """The listening side of the handshake. Raises ValueError for a client that does not know the token."""
        until = time.monotonic() + HANDSHAKE_SECONDS
        ours = secrets.token_bytes(_RANDOM)
        _send(end, ours, until)
        theirs, proof = _receive(end, _RANDOM, until), _receive(end, _MAC, until)
        if not hmac.compare_digest(proof, _proof(token, b"asks", ours + theirs)):
            raise ValueError("the client does not know the token")
        _send(end, _proof(token, b"answers", ours + theirs), until)
        return cls(end, _proof(token, b"messages", ours + theirs), listens=True)

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Channel:
        """A connection to a listener. Raises OSError, EOFError, and ValueError where it does not know the token."""
        end = socket.create_connection((host, port), timeout=SECONDS)
        try:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            until = time.monotonic() + SECONDS  # its other connections may keep it busy
            theirs, ours = _receive(end, _RANDOM, until), secrets.token_bytes(_RANDOM)
            _send(end, ours + _proof(token, b"asks", theirs + ours), until)
            if not hmac.compare_digest(_receive(end, _MAC, until), _proof(token, b"answers", theirs + ours)):
                raise ValueError("the listener does not know the token")
            return cls(end, _proof(token, b"messages", theirs + ours), listens=False)
        except BaseException:
            end.close()
            raise

    def close(self) -> None:
        """End the connection."""
        self._end.close()

    def say(self, message: BaseModel) -> None:
        """Send a message."""
        data = message.model_dump_json().encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes")
        _send(self._end, _LENGTH.pack(len(data)) + data + self._mac_of_next(data), time.monotonic() + SECONDS)

    def hear(self, model: type[M], *, idle: bool = False) -> M:
        """The next message; with `idle`, it may begin at any time."""
        if idle:
            self._end.settimeout(None)
            if not self._end.recv(1, socket.MSG_PEEK):
                raise EOFError("the other end has gone")
        until = time.monotonic() + SECONDS
        (length,) = _LENGTH.unpack(_receive(self._end, _LENGTH.size, until))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes")
        return parse_json(self._checked(length, until), model, "a message of another node")

    def send_bytes(self, data: bytes) -> None:
        """Send the bytes that follow a message, which says their size."""
        until, view = _until(len(data)), memoryview(data)
        for at in range(0, len(view), CHUNK):
            part = view[at : at + CHUNK]
            _send(self._end, part, until)
            _send(self._end, self._mac_of_next(part), until)

    def receive_bytes(self, size: int) -> Iterator[bytes]:
        """The bytes that follow a message, in chunks that have been checked."""
        until = _until(size)
        for at in range(0, size, CHUNK):
            yield self._checked(min(CHUNK, size - at), until)

    def _checked(self, size: int, until: float) -> bytes:
        data, mac = _receive(self._end, size, until), _receive(self._end, _MAC, until)
        if not hmac.compare_digest(mac, _mac(self._key, self._theirs, self._received, data)):
            raise ValueError("something was changed on its way")
        self._received += 1
        return data

    def _mac_of_next(self, data: bytes | memoryview) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return _mac(self._key, self._ours, number, data)


def _proof(token: str, purpose: bytes, both: bytes) -> bytes:
    return hmac.digest(token.encode(), purpose + both, _HASH)


def _mac(key: bytes, direction: bytes, number: int, data: bytes | memoryview) -> bytes:
    mac = hmac.new(key, direction + _NUMBER.pack(number), _HASH)
    mac.update(data)
    return mac.digest()


def _until(size: int) -> float:
    return time.monotonic() + SECONDS + size / LEAST_RATE


def _send(end: socket.socket, data: bytes | memoryview, until: float) -> None:
    end.settimeout(_rest(until))  # limit for all of it
    end.sendall(data)


def _receive(end: socket.socket, size: int, until: float) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        end.settimeout(_rest(until))
        if not (received := end.recv_into(view)):
            raise EOFError("the other end has gone")
        view = view[received:]
    return bytes(data)


def _rest(until: float) -> float:
    if (rest := until - time.monotonic()) <= 0:
        raise TimeoutError("the other end is too slow")
    return rest
