"""Records of archives: the files in a .zip, and the samples in a .tar as WebDataset writes them.

An archive is read as a stream, member after member, and no member is held that is longer than a record may be. Numbers
in an archive, such as sizes, decide no allocation.
"""

import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, BinaryIO, cast

from holdfast.corpus.compression import DAMAGE, CorruptFileError, decompressed, is_damage
from holdfast.corpus.files import NOT_TEXT, SourceFile, advice, opened, suffixes
from holdfast.corpus.json_csv import stream_records
from holdfast.corpus.record_types import Flaw, Reading, Record, document_of, text_of

MAX_READ = 64 * 2**20  # bytes that an archive's own structures may have, such as the directory of a .zip
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # that `zipfile` reads in bounded memory
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # key and extension of a member, as in WebDataset
TEXTS = ("txt", "text", "transcript")  # extensions of text, as in WebDataset
JSON = ("json", "jsn")
KEPT_BYTES = 512  # that are kept to read again


def archive_records(file: SourceFile, reading: Reading) -> Iterator[tuple[int, Record]]:
    """The documents of an archive, with their numbers from 1."""
    if file.format == "zip" and file.compression:
        raise CorruptFileError(f"is a .zip in .{file.compression}, which cannot be read in parts; unpack it", NOT_TEXT)
    with opened(file) as stream:
        found = _zip(stream, reading) if file.format == "zip" else _tar(stream, reading)
        try:
            yield from enumerate(found, 1)
        except NotImplementedError as error:  # of zipfile, for a newer version of the format or an encryption
            raise CorruptFileError(
                f"is a .zip that cannot be read ({error}); pack it again with another program, without encryption"
            ) from None
        except (zipfile.BadZipFile, tarfile.TarError, ValueError, EOFError) as error:
            raise CorruptFileError(f"is no whole .{file.format} ({error}); fetch it again") from None


def _zip(stream: BinaryIO, reading: Reading) -> Iterator[Record]:
    with zipfile.ZipFile(cast(IO[bytes], _Bounded(stream))) as archive:
        for info in archive.infolist():
            parts = info.filename.split("/")
            if info.is_dir() or any(part.startswith((".", "__MACOSX")) for part in parts):
                continue
            for record in _zipped(archive, info, reading):
                yield _in_member(record, info.filename)


def _zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, reading: Reading) -> Iterator[Record]:
    format_ = suffixes(info.filename, "auto")[0]
    if format_ not in ("text", "jsonl", "json", "csv"):
        remedy = advice(info.filename) if format_ == "other" else f"{format_} in a .zip is not read; unpack it"
        yield Flaw(NOT_TEXT, remedy)
    elif info.flag_bits & 1 or info.compress_type not in COMPRESSIONS:
        problem = "is encrypted" if info.flag_bits & 1 else f"has the compression {info.compress_type}"
        yield Flaw(NOT_TEXT, f"{problem}, which is not read; unpack it")
    elif reading.kind != "text" and format_ == "text":
        yield Flaw("no_text", f"is text, and {reading.kind} is read from records")
    else:
        try:
            with archive.open(info) as raw:
                yield from _streamed(cast(BinaryIO, raw), info.filename, reading)
        except zipfile.BadZipFile as error:
            yield _damaged(error)


def _streamed(raw: BinaryIO, name: str, reading: Reading) -> Iterator[Record]:
    """The documents of a member that is read in order. Damage in it is a flaw, and other members are read."""
    format_, compression = suffixes(name, "auto")
    try:
        with decompressed(raw, compression) as stream:
            for _, record in stream_records(stream, name, format_, reading):
                yield record
    except CorruptFileError as error:
        yield Flaw(error.reason, str(error))
    except (EOFError, *DAMAGE) as error:
        yield _damaged(error)
    except Exception as error:
        if not is_damage(error, compression):
            raise
        yield _damaged(error)


def _damaged(error: Exception) -> Flaw:
    return Flaw("corrupt", f"is damaged ({error}); fetch the archive again")


def _in_member(record: Record, name: str) -> Record:
    return replace(record, detail=f"{name}: {record.detail}") if isinstance(record, Flaw) else record


@dataclass
class _Sample:
    """The members with one key, of which only those that a document may need are kept."""

    key: str
    names: set[str] = field(default_factory=set)  # all extensions
    members: dict[str, bytes] = field(default_factory=dict)
    flaw: Flaw | None = None


def _tar(stream: BinaryIO, reading: Reading) -> Iterator[Record]:
    sample = _Sample("")
    forward = _Forward(stream)
    with tarfile.open(fileobj=cast(IO[bytes], forward), mode="r:") as archive:
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else the list of members grows
            base = info.name.rpartition("/")[2]
            if not info.isfile() or base.startswith("."):
                continue
            match = MEMBER.fullmatch(info.name)
            if match is None:
                yield Flaw(NOT_TEXT, f"{info.name}: has no extension, by which a member of a .tar is read")
                continue
            key, extension = match[1], match[2].lower()
            if key != sample.key or extension in sample.names:
                yield from _of_sample(sample, reading)
                sample = _Sample(key)
            if suffixes(info.name, "auto")[0] in ("jsonl", "csv"):
                member = archive.extractfile(info)
                assert member is not None
                for record in _streamed(cast(BinaryIO, member), info.name, reading):
                    yield _in_member(record, info.name)
                continue
            sample.names.add(extension)
            if extension in (reading.text_field, *TEXTS, *JSON):
                _keep(sample, extension, archive, info, reading)
        yield from _of_sample(sample, reading)
        forward.seek(archive.offset)  # `tarfile` takes a damaged header for the end
        if forward.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise EOFError("a member is damaged, or the end is missing")
        while block := forward.read(2**20):
            if block.strip(b"\0"):
                yield Flaw("corrupt", "has more data after its end, which are not read; pack the archives into one")
                return


def _keep(sample: _Sample, extension: str, archive: tarfile.TarFile, info: tarfile.TarInfo, reading: Reading) -> None:
    if info.size > reading.line_limit:
        detail = f"{info.name}: has {info.size:,} bytes, more than the {reading.line_limit:,} that are read"
        sample.flaw = Flaw("too_long", detail)
        return
    member = archive.extractfile(info)
    assert member is not None
    sample.members[extension] = member.read(reading.line_limit)
    if len(sample.members[extension]) != info.size:
        raise EOFError(f"{info.name} ends too early")


def _of_sample(sample: _Sample, reading: Reading) -> Iterator[Record]:
    """The document of a sample: its text for `text_field`, or the record of its JSON."""
    if not sample.names:
        return
    try:
        yield sample.flaw or _in_member(_document(sample, reading), sample.key)
    except UnicodeDecodeError as error:
        yield Flaw("undecodable", f"{sample.key}: is not UTF-8 ({error.reason}); convert it to UTF-8")
    except (ValueError, RecursionError) as error:
        yield Flaw("not_json", f"{sample.key}: is not JSON ({error})")


def _document(sample: _Sample, reading: Reading) -> Record:
    record = {}
    for name in JSON:
        if name in sample.members:
            value = json.loads(sample.members[name].decode("utf-8-sig"))
            record = value if isinstance(value, dict) else {}
    if reading.kind != "text" or reading.text_field in record:
        return document_of(record, reading)
    for name in (reading.text_field, *TEXTS):
        if name in sample.members:
            return text_of(sample.members[name].decode("utf-8-sig"), name)
    found = ", ".join(f".{name}" for name in sorted(sample.names)[:8])
    return Flaw("no_text", f"has no text under {reading.text_field!r}, and no .txt; it has {found}")


class _Bounded:
    """A seekable stream that refuses to read absurdly much in one call."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, or all that follow. Raises CorruptFileError for too many."""
        data = self._stream.read(_checked(size if size >= 0 else MAX_READ))
        if size < 0:
            _checked(len(data) + len(self._stream.read(1)))
        return data


def _checked(size: int) -> int:
    """The size of a structure of an archive. Raises CorruptFileError if it is too large."""
    if not 0 <= size <= MAX_READ:
        raise CorruptFileError(f"has a structure of {size:,} bytes, and {MAX_READ:,} are read", "too_large")
    return size


class _Forward:
    """A stream that can be read only forward, for `tarfile`, which goes back by a few bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._at, self._kept, self._back = 0, b"", 0  # position of the stream, its last bytes, how far back we are

    def tell(self) -> int:
        """The position."""
        return self._at - self._back

    def seekable(self) -> bool:
        """False."""
        return False

    def seek(self, position: int) -> int:
        """Move forward by reading, or back within the last bytes. Raises ValueError."""
        while self.tell() < position:
            if not self.read(min(2**20, position - self.tell())):
                break
        if (back := self._at - position) > 0:
            if back > len(self._kept):
                raise ValueError("a member begins before the one that precedes it")
            self._back = back
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes. Raises CorruptFileError for too many."""
        size, parts = _checked(size), []
        if self._back:
            parts.append(self._kept[len(self._kept) - self._back :][:size])
            self._back -= len(parts[0])
            size -= len(parts[0])
        while size and (part := self._stream.read(size)):
            parts.append(part)
            size -= len(part)
            self._at += len(part)
            self._kept = (self._kept + part)[-KEPT_BYTES:]
        return b"".join(parts)
