"""Files of one folder at any location, read by ranges. Needs no torch."""

from pathlib import Path
from typing import Protocol

from holdfast.spec.errors import DataError, MissingError

SMALL_BYTES = 16 * 2**20  # of a configuration or an index
TOKENIZER_BYTES = 256 * 2**20


class Files(Protocol):
    """The files of one folder."""

    @property
    def where(self) -> str:
        """The folder, for people."""

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or None if it does not exist."""

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with bytes from `start` on. Raises DataError or MissingError."""


class Folder:
    """The files of a folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.path)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or None if it does not exist."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with bytes from `start` on. Raises DataError or MissingError."""
        try:
            with (self.path / name).open("rb", buffering=0) as file:
                file.seek(start)
                filled = 0
                while count := file.readinto(target[filled:]):
                    filled += count
        except FileNotFoundError:
            raise MissingError(f"{self.path / name}: no such file") from None
        except OSError as error:
            raise DataError(f"{self.path / name}: cannot be read: {error}") from None
        if filled < target.nbytes:
            raise DataError(f"{self.path / name}: ends after {start + filled} bytes; download it again")


def read_bytes(files: Files, name: str, most: int = SMALL_BYTES) -> bytes | None:
    """A whole small file, or None if it does not exist. Raises DataError for more than `most` bytes."""
    size = files.size(name)
    if size is None:
        return None
    if size > most:
        raise DataError(f"{files.where}/{name}: has {size} bytes, and at most {most} are read; download it again")
    data = bytearray(size)
    files.read_into(name, 0, memoryview(data))
    return bytes(data)
