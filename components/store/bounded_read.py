"""Reads of objects and files whose size another writer chose.

Promises that the size is compared with the bound before a buffer is made, and that one request does both: a growing
object never passes the check and then fills the memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.store.interface import Store
from holdfast.components.store.payload import too_large

SMALL_BYTES = 16 * 2**20  # of a JSON record: a spec, a result, a verdict, a configuration


def read_bounded(store: Store, key: str, most: int = SMALL_BYTES) -> bytes:
    """The whole object. Raises TooLargeError (a DataError) if it has more than `most` bytes; nothing is read then."""
    return store.get(key, most=most)


def read_file_bounded(path: Path, most: int = SMALL_BYTES) -> bytes:
    """A whole local file. Raises MissingError, DataError for what is no regular file, and TooLargeError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block the open
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is no regular file; name one that is")
        if status.st_size > most:
            raise too_large(str(path), status.st_size, most)
        found = bytearray()
        while len(found) <= most and (block := file.read(min(2**20, most + 1 - len(found)))):
            found += block
    if len(found) > most:  # it grew, or the file system does not know its size
        raise too_large(str(path), len(found), most)
    return bytes(found)
