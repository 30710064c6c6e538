"""Decompression of a file as a stream, in bounded memory, with a truncated end that is detected."""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal, cast

from holdfast.spec.errors import DataError

Compression = Literal["", "gz", "zst", "xz", "bz2"]
NAMES: dict[Compression, str] = {"gz": "gzip", "zst": "zstd", "xz": "xz", "bz2": "bzip2"}

READ_BYTES = 4 * 2**20
MAX_WINDOW = 512 * 2**20  # bytes of a zstd file's largest window, as for `zstd --long=29`
ZSTD_HEADER = 18  # bytes of the longest frame header
DAMAGE = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)


class CorruptFileError(DataError):
    """The rest of a file cannot be read. Data read before is valid."""

    def __init__(self, message: str, reason: str = "corrupt") -> None:
        super().__init__(message)
        self.reason = reason  # the reason that counts the file


@contextlib.contextmanager
def decompressed(raw: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """The decompressed bytes of a stream. Reading them raises what `is_damage` knows, EOFError or
    CorruptFileError."""
    match compression:
        case "gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(BinaryIO, stream)
        case "bz2":
            yield cast(BinaryIO, io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor, padding=b""), READ_BYTES))
        case "zst":
            yield cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), READ_BYTES))
        case "xz":
            yield cast(BinaryIO, io.BufferedReader(_Streams(raw, _xz_decompressor), READ_BYTES))
        case _:
            yield raw


def is_damage(error: Exception, compression: Compression) -> bool:
    """Whether an error of reading says that compressed data are damaged. bz2 raises OSError without an errno."""
    is_bz2 = compression == "bz2" and isinstance(error, OSError) and error.errno is None
    return isinstance(error, DAMAGE) or is_bz2 or type(error).__module__.startswith("zstandard")


Decompressor = lzma.LZMADecompressor | bz2.BZ2Decompressor


def _xz_decompressor() -> lzma.LZMADecompressor:
    """A decompressor of a stream, which decides how much memory it takes, up to a limit."""
    return lzma.LZMADecompressor(memlimit=MAX_WINDOW)


class _Streams(io.RawIOBase):
    """Decompresses one xz, lzma or bzip2 stream after another. What follows a stream and is neither another one nor
    `padding` is damage. bzip2 has no padding."""

    BITE = 2**16

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Decompressor], padding: bytes = b"\0") -> None:
        self._raw, self._new, self._padding = raw, decompressor, padding
        self._decompressor: Decompressor | None = None
        self._input = b""

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the bytes of one decompression step."""
        view = memoryview(buffer).cast("B")
        while True:
            if self._decompressor is None:
                self._input = self._input.lstrip(self._padding)
                if not self._input:
                    self._input = self._raw.read(self.BITE)
                    if not self._input:
                        return 0
                    continue
                self._decompressor = self._new()
            if self._decompressor.needs_input and not self._input:
                self._input = self._raw.read(self.BITE)
                if not self._input:
                    raise EOFError("the last stream ends too early")
            data = self._step(self._decompressor, len(view))
            view[: len(data)] = data
            if data:
                return len(data)

    def _step(self, decompressor: Decompressor, size: int) -> bytes:
        data, self._input = self._input, b""
        try:
            output = decompressor.decompress(data, size)
        except lzma.LZMAError as error:
            if "limit" in str(error).lower():
                raise CorruptFileError(
                    f"needs more than {MAX_WINDOW // 2**20} MiB to decompress; compress it again with `xz -9` or less",
                    reason="window_too_large",
                ) from None
            raise
        if decompressor.eof:
            self._input, self._decompressor = decompressor.unused_data, None
        return output


class _ZstdStream(io.RawIOBase):
    """Decompresses frame after frame, and detects a truncated last frame, which zstandard's own reader does not.

    A frame may expand 32 000-fold, so input is fed in small pieces: one piece gives at most 32 MiB.
    """

    BITE = 1024

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._zstandard = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the bytes of one decompression step."""
        view = memoryview(buffer).cast("B")
        while not self._output:
            self._input = self._input or self._raw.read(self.BITE)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame ends too early")
                return 0
            self._frame = self._frame or self._next_frame()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(view), len(self._output))
        view[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _next_frame(self) -> Any:
        """A decompressor for the frame at the start of the input. Raises CorruptFileError for a window that is too
        large."""
        while len(self._input) < ZSTD_HEADER and (more := self._raw.read(ZSTD_HEADER - len(self._input))):
            self._input += more
        with contextlib.suppress(self._zstandard.ZstdError):  # of a damaged header: decompression reports the problem
            window = self._zstandard.get_frame_parameters(self._input).window_size
            if window > MAX_WINDOW:
                raise CorruptFileError(
                    f"needs a window of {window / 2**20:,.0f} MiB, and at most {MAX_WINDOW // 2**20} MiB are read; "
                    "compress it again with `zstd --long=29` or less",
                    reason="window_too_large",
                )
        return self._decompressor.decompressobj()
