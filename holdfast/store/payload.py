"""Keys and payloads: the checks and cuts that both stores share.

A bad key is refused before any operation. Buffers are sliced, never joined.
"""

import io
from collections.abc import Callable, Iterator

from blake3 import blake3

from holdfast.spec.errors import DataError
from holdfast.store.interface import Buffer, ConflictError, Data, TooLargeError

KEY_BYTES = 900  # S3 allows 1024, including the prefix of the store
DCP_METADATA = ".metadata"  # the file that makes a folder a distributed checkpoint of torch; lists do not show it
NAME_BYTES = 200  # a name in a folder has at most 255 bytes

Pieces = list[memoryview]  # laid one after another


def check_key(key: str) -> str:
    """Return `key`. Raises ValueError if it could leave the root, hide, or not exist on some store."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"key {key[:100]!r}: parts must be non-empty and not '.' or '..'; write it as folder/name")
    if any(part.startswith(".") for part in parts) and key != DCP_METADATA:
        raise ValueError(f"key {key[:100]!r}: parts that begin with a dot belong to the store; drop the dot")
    if "\\" in key or not key.isprintable():
        raise ValueError(f"key {key[:100]!r}: backslashes and control characters are refused; use plain names")
    if len(key.encode()) > KEY_BYTES or any(len(part.encode()) > NAME_BYTES for part in parts):
        raise ValueError(
            f"key {key[:100]!r}...: longer than {KEY_BYTES} bytes, or a part over {NAME_BYTES}; shorten it"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix`: empty, or the beginning of a key. Raises ValueError otherwise."""
    if prefix:
        check_key(prefix.removesuffix("/") if len(prefix) > 1 else prefix)
    return prefix


def check_folder(folder: str) -> str:
    """Return `folder`: the beginning of a key up to a `/`. Raises ValueError otherwise."""
    if not folder.endswith("/"):
        raise ValueError(f"folder {folder[:100]!r}: name one, with a slash at its end, as in runs/<run-id>/")
    return check_prefix(folder)


def check_range(start: int, length: int | None) -> None:
    """Raises ValueError for a negative start or length."""
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"range start {start}, length {length}: neither may be negative")


def too_short(key: str, size: int, start: int, length: int) -> DataError:
    """The error for a range that an object of `size` bytes does not have."""
    return DataError(
        f"{key}: has {size} bytes, and bytes {start} to {start + length} were requested; it is truncated or "
        "not the object that was meant"
    )


def too_large(key: str, size: int, most: int) -> TooLargeError:
    """The error for an object, or a part of one, that is larger than its reader accepts."""
    return TooLargeError(
        f"{key}: has {size} bytes, and at most {most} are read; it is not the object that was meant: "
        "find out what wrote it, and remove or replace it"
    )


def conflict(key: str, current: str | None, expected: str | None) -> ConflictError:
    """The error for a replacement of an object whose version is `current`, not `expected`; None: absent."""
    return ConflictError(
        f"{key}: version is {current or 'absent'}, not {expected or 'absent'}: another writer was first; "
        "read it again and decide anew"
    )


def views(data: Data) -> Pieces:
    """The buffers of `data` as views of bytes, without copying."""
    buffers: list[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
    return [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]


def size_of(pieces: Pieces) -> int:
    """Bytes in all pieces together."""
    return sum(piece.nbytes for piece in pieces)


def window(pieces: Pieces, start: int, length: int) -> Iterator[memoryview]:
    """The bytes [start, start + length) of the concatenated pieces, as views."""
    for piece in pieces:
        if length <= 0:
            return
        if start >= piece.nbytes:
            start -= piece.nbytes
            continue
        part = piece[start : start + length]
        yield part
        start, length = 0, length - part.nbytes


def filled(size: int, fill: Callable[[memoryview], None]) -> bytes:
    """The `size` bytes that `fill` writes into a buffer, without a copy of them."""
    buffer = io.BytesIO()
    if size:
        buffer.seek(size - 1)
        buffer.write(b"\0")
    with buffer.getbuffer() as view:
        fill(view)
    return buffer.getvalue()  # returns its own buffer without a copy, since nothing else holds it


def content_digest(pieces: Pieces) -> str:
    """A digest of the concatenated pieces, in hexadecimal."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
