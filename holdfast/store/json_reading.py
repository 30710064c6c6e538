"""Bounded reads of small objects and files, raw or as typed JSON.

An object that is too large or not valid JSON is a DataError that names it, and never another kind of failure.
`holdfast.spec.json_parsing` does the parsing.
"""

import io
import os
import stat
from pathlib import Path
from typing import TypeVar

from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import REMEDY, JsonObject, parse_json, parse_json_object
from holdfast.store.interface import Store
from holdfast.store.payload import too_large

# Reads of objects and files whose size another writer chose.
#
# The size is compared with the bound before a buffer is allocated, within the same request. So a growing object never
# passes the check and then fills the memory.

SMALL_BYTES = 16 * 2**20  # limit of a JSON record: a spec, a result, a verdict, a configuration


def read_bounded(store: Store, key: str, most: int = SMALL_BYTES) -> bytes:
    """The whole object. Raises TooLargeError (a DataError) if it has more than `most` bytes; nothing is read then."""
    return store.get(key, most=most)


def open_regular(path: Path) -> io.FileIO:
    """A local file, opened for reading without a buffer. Raises MissingError, and DataError for a file that cannot be
    opened or is not regular: a pipe would block, and a device has no size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise DataError(f"{path}: cannot be read: {error}") from None
    file = io.FileIO(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise DataError(f"{path}: is no regular file; name one that is")
    return file


def read_file_bounded(path: Path, most: int = SMALL_BYTES) -> bytes:
    """A whole local file. Raises as `open_regular` does, and TooLargeError."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise too_large(str(path), size, most)
        data = bytearray()
        while len(data) <= most and (block := file.read(min(2**20, most + 1 - len(data)))):
            data += block
    if len(data) > most:  # it grew, or the file system does not know its size
        raise too_large(str(path), len(data), most)
    return bytes(data)


T = TypeVar("T")


def read_json(store: Store, key: str, model: type[T], remedy: str = REMEDY) -> T:
    """The record at `key` as `model`. Raises MissingError, and DataError for an invalid record."""
    return parse_json(read_bounded(store, key), model, f"{store.url}/{key}", remedy)


def read_json_object(store: Store, key: str, remedy: str = REMEDY) -> JsonObject:
    """The record at `key` as an object whose fields the caller checks. Raises as `read_json`."""
    return parse_json_object(read_bounded(store, key), f"{store.url}/{key}", remedy)


def find_json(store: Store, key: str, model: type[T], remedy: str = REMEDY) -> T | None:
    """The same; None if the object does not exist."""
    try:
        return read_json(store, key, model, remedy)
    except MissingError:
        return None
