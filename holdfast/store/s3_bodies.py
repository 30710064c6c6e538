"""Bodies of S3 requests, in blocks that suit an HTTP client, and the checksum with which the server verifies them.

The checksum is CRC32C: every S3 knows it, and awscrt computes it ten times as fast as a CRC32, outside of the GIL. It
is sent as a header, not as a trailer, so that it is signed and a server needs no chunked encoding. awscrt is imported
at the first write: the import takes 30 ms.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from itertools import accumulate
from typing import Any

from holdfast.store.payload import Pieces, size_of

BLOCK_BYTES = 2**20  # sent together: urllib3 gives each block the whole timeout, and each costs a turn of the GIL
WHOLE_BYTES = 2**20  # up to this size, a body is one block with its headers, without "Expect: 100-continue"


def crc32c(pieces: Pieces) -> str:
    """The CRC32C of the concatenated pieces, as S3 writes it."""
    from awscrt import checksums

    crc = 0
    for piece in pieces:
        crc = checksums.crc32c(piece, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def body(pieces: Pieces) -> Any:
    """The pieces as the body of a request."""
    if size_of(pieces) > WHOLE_BYTES:
        return Body(pieces)
    if len(pieces) == 1 and type(pieces[0].obj) is bytes and len(pieces[0].obj) == pieces[0].nbytes:
        return pieces[0].obj
    return b"".join(pieces)


class Body:
    """Pieces as one seekable file. A read returns whole blocks, for any requested size: urllib3 requests 16 KiB, takes
    what it gets, and would spend more time on requests than on sending. Only small pieces are joined."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(piece.nbytes for piece in pieces))
        self._size = self._ends[-1] if self._ends else 0
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def read(self, size: int | None = None) -> bytes | memoryview:  # noqa: ARG002 - see above
        """The next block; empty at the end."""
        taken: Pieces = []
        missing = BLOCK_BYTES
        number = bisect_right(self._ends, self._position)
        while missing and number < len(self._pieces):
            piece = self._pieces[number]
            part = piece[piece.nbytes - (self._ends[number] - self._position) :][:missing]
            if taken and part.nbytes > BLOCK_BYTES // 4:
                break
            taken.append(part)
            missing -= part.nbytes
            self._position += part.nbytes
            number += 1
            if part.nbytes > BLOCK_BYTES // 4:
                break
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start (whence 0), the position (1) or the end (2)."""
        base = (0, self._position, self._size)[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def tell(self) -> int:
        """Bytes from the start."""
        return self._position
