"""Frames of a node's standard output on its way to the launcher: what the ranks print, events, the exit report.

A frame is a kind of one byte, the length of its content (4 bytes, big endian), and the content. The first frame follows
a line that a shell's start-up files cannot print: GREETING and a token of the launcher.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import IO

GREETING = b"holdfast node "
READY, OUTPUT, EVENT, REPORT = b"r", b"o", b"e", b"x"
LONGEST_FRAME = 1 << 20  # bytes
LONGEST_NOISE = 1 << 16  # bytes that start-up files may print before the greeting
HEARTBEAT_SECONDS = 5.0  # between two lines of the launcher
SILENCE_SECONDS = 60.0  # without a line of the launcher, after which a node ends its ranks
_HEADER = struct.Struct(">cI")


class FrameWriter:
    """Writes frames to a stream, from any thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def greet(self, token: str) -> None:
        """Write the greeting, before any frame."""
        self._stream.write(GREETING + token.encode() + b"\n")
        self._stream.flush()

    def write(self, kind: bytes, content: bytes) -> None:
        """Write one frame. Raises OSError if no process reads any more, and ValueError for more than LONGEST_FRAME."""
        if len(content) > LONGEST_FRAME:
            raise ValueError(f"a frame of {len(content)} bytes is longer than {LONGEST_FRAME}")
        with self._lock:
            self._stream.write(_HEADER.pack(kind, len(content)) + content)
            self._stream.flush()


def frames_of(stream: IO[bytes], token: str) -> Iterator[tuple[bytes, bytes]]:
    """The frames of a stream, after its greeting. Ends at the end of the stream, also within a frame. Raises
    ValueError for a frame that is too long, and if the greeting does not come."""
    noise, greeting = 0, GREETING + token.encode() + b"\n"
    while (line := stream.readline(LONGEST_NOISE)) and not line.endswith(greeting):
        if (noise := noise + len(line)) > LONGEST_NOISE:
            raise ValueError(f"{noise} bytes came before the node's greeting")
    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        if length > LONGEST_FRAME:
            raise ValueError(f"a frame of {length} bytes is longer than {LONGEST_FRAME}")
        if len(content := stream.read(length)) < length:
            return
        yield kind, content
