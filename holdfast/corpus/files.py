"""Files of a source at any location: their identity, their bytes as streams, and a check that they are unchanged.

Memory is bounded, because everything is read as a stream. A file that changed after its content was digested is
refused.
"""

import contextlib
import errno
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, overload

from blake3 import blake3

from holdfast.corpus.compression import (
    DAMAGE,
    NAMES,
    READ_BYTES,
    Compression,
    CorruptFileError,
    decompressed,
    is_damage,
)
from holdfast.model.hub import dataset_file, hub_file, is_hub
from holdfast.spec.errors import AccessDeniedError, DataError, HoldfastError, MissingError
from holdfast.store import Store, in_bucket, open_store
from holdfast.store.json_reading import read_bounded, read_file_bounded
from holdfast.store.payload import check_key

# File names: formats that are read, and data that must not be trained on as text.

# "other" is data without a supported format
Format = Literal["text", "jsonl", "parquet", "json", "csv", "arrow", "zip", "tar", "megatron", "other"]

NOT_TEXT = "not_text"  # the reason that counts such files
LFS_ADVICE = "is a pointer of Git LFS and not the file; run `git lfs pull`"

# Extensions of data that is no text, by the remedy.
NOT_READ = {
    "table": (
        "avro dbf dta h5 hdf hdf5 mat mdb msgpack npy npz ods orc parq pq psv "
        "rdata rds sas7bdat sav sqlite sqlite3 tfrecord tfrecords xls xlsb xlsm xlsx db lmdb mdx idx bin "
        "pkl pickle joblib"
    ),
    "archive": ("7z apk br cab cpio deb dmg gzip iso jar lz lz4 lzma lzo rar rpm snappy war whl zlib zstd"),
    "document": ("azw3 chm djvu doc docm docx epub mobi odp odt pdf ppt pptm pptx rtf xps"),
    "media": (
        "aac avi avif bmp eot flac flv gif heic heif ico icns jfif jp2 jpeg jpg jxl m4a m4v mid midi mkv mov "
        "mp3 mp4 mpeg mpg oga ogg ogv opus otf png psd tif tiff ttf wav webm webp wma wmv woff woff2"
    ),
    "program": (
        "a class ckpt dll dylib exe gguf ggml msi o obj onnx pb pdb pt pth pyc pyd pyo safetensors so tflite wasm"
    ),
}
_KINDS = {name: kind for kind, names in NOT_READ.items() for name in names.split()}


FORMATS: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"),
    "json": (".json",),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "zip": (".zip",),
    "tar": (".tar",),
}
SUFFIXES: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
TARS = {".tgz": ".gz", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}
_FORMAT_OF = {suffix: format_ for format_, names in FORMATS.items() for suffix in names}


def suffixes(name: str, wanted: Format | Literal["auto"]) -> tuple[Format, Compression]:
    """The format and the compression of a file, from its name."""
    path = PurePath(name.lower())
    if path.suffix in TARS:
        path = path.with_suffix(f".tar{TARS[path.suffix]}")
    compression = SUFFIXES.get(path.suffix, "")
    if compression:
        path = path.with_suffix("")
    if wanted != "auto":
        return wanted, compression
    return _FORMAT_OF.get(path.suffix, "other" if _kind(path.suffix) else "text"), compression


def advice(name: str) -> str:
    """The advice for a file of the format `other`."""
    path = PurePath(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in SUFFIXES else path.suffix
    if suffix in (".parq", ".pq"):
        remedy = "set the source's `format` to parquet"
    elif suffix in (".bin", ".idx"):
        remedy = "set the source's `format` to megatron if they are Megatron's indexed data, or leave them out"
    else:
        remedy = {
            "table": "convert it to .jsonl or .parquet, or set the source's `format` to text to train on it as it is",
            "archive": "unpack it; .zip and .tar are read, and single files compressed as .gz, .zst, .xz or .bz2",
        }.get(_kind(suffix) or "", "extract its text, or leave it out of the pattern")
    return f"{suffix} files are not read as text; {remedy}"


def _kind(suffix: str) -> str | None:
    return _KINDS.get(suffix.removeprefix("."))


MMAP_BYTES = 1 << 20

UNREADABLE = (
    errno.EIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_POINTER_BYTES = 1024  # a pointer is shorter


@dataclass(frozen=True)
class SourceFile:
    """One file. `digest` identifies its content. `stamp` changes if it is written again."""

    name: str  # for people
    kind: Literal["local", "s3", "dvc", "hub"]
    root: str  # s3: the bucket's URL; dvc, hub: the repository; local: nothing
    path: str  # local: the path; s3: the key; dvc, hub: the path in the repository
    digest: str
    size: int  # bytes
    stamp: str  # local: modification time; s3: the ETag; dvc, hub: the commit
    format: Format
    compression: Compression

    @property
    def content(self) -> list[str]:
        """The values that determine the documents in this file."""
        return [self.format, self.compression, self.digest]


@contextlib.contextmanager
def opened(file: SourceFile, decompress: bool = True) -> Iterator[BinaryIO]:
    """The bytes of a file as a stream. Raises MissingError, AccessDeniedError, and DataError for a changed or
    corrupt file."""
    with _speaking(file), contextlib.ExitStack() as stack:
        _unchanged(file)
        if decompress and file.compression and not file.size:
            raise CorruptFileError(f"has no bytes, and is not {NAMES[file.compression]} data; fetch it again")
        raw = stack.enter_context(_raw(file))
        stream = stack.enter_context(decompressed(raw, file.compression)) if decompress else raw
        yield stream
        _unchanged(file)


@lru_cache(maxsize=8)
def bucket_store(url: str) -> Store:
    """The bucket of a source. One connection pool per process."""
    return open_store(url)


def dvc_filesystem(repository: str, revision: str | None) -> Any:
    """A DVC repository at a revision, which may be a moving one. Raises MissingError."""
    try:
        from dvc.api import DVCFileSystem
        from dvc.exceptions import DvcException, NotDvcRepoError
    except ModuleNotFoundError as error:
        raise MissingError(
            f"data.sources: a `dvc:` source needs DVC, and there is no module {error.name}; pip install "
            "'holdfast[dvc]', or copy the files and name their folder"
        ) from None

    remedy = "check `repo` and `revision` of the source"
    try:
        return DVCFileSystem(repository, rev=revision)
    except NotDvcRepoError:
        raise MissingError(f"{repository}: is not a DVC repository; {remedy}") from None
    except DvcException as error:
        raise MissingError(f"{repository}: {error}; {remedy}") from None


@lru_cache(maxsize=8)
def _dvc_at_commit(repository: str, commit: str) -> Any:
    return dvc_filesystem(repository, commit)


def local_stamp(path: Path) -> str:
    """A value that changes if the file is written again."""
    status = path.stat()
    return f"{status.st_mtime_ns}:{status.st_size}"


def here(file: SourceFile) -> SourceFile:
    """A file that another machine listed, as it is on this one. Local files are the same if their bytes are.

    Raises MissingError if it is not on this machine, and DataError if it differs.
    """
    if file.kind != "local":
        return file
    with _speaking(file):
        try:
            stamp = local_stamp(Path(file.path))
        except FileNotFoundError:
            raise MissingError(
                f"{file.path}: is not on this machine; where several machines prepare a corpus, put its files into a "
                "bucket, or into a folder that all of them mount at the same path"
            ) from None
        if stamp != file.stamp and _digest_at(file.path, stamp) != file.digest:
            raise DataError(f"{file.path}: has other bytes than when the corpus was divided; run divide again")
    return replace(file, stamp=stamp)


@lru_cache(maxsize=4096)
def _digest_at(path: str, _stamp: str) -> str:
    """Digest of a file that is read in many ranges, computed once."""
    return digest_of(Path(path))


def digest_of(path: Path) -> str:
    """The blake3 digest of a local file."""
    hasher = blake3()
    if path.stat().st_size < MMAP_BYTES:
        hasher.update(path.read_bytes())
    else:
        hasher.update_mmap(path)
    return hasher.hexdigest()


class StoreStream(io.RawIOBase):
    """A seekable stream over an object of a store, by ranged reads."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as for any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the object has bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        if count:
            self._store.read_into(self._key, self._at, view[:count])
            self._at += count
        return count


@contextlib.contextmanager
def _raw(file: SourceFile) -> Iterator[BinaryIO]:
    if file.kind == "local":
        with Path(file.path).open("rb") as stream:
            yield stream
    elif file.kind == "s3":
        yield io.BufferedReader(StoreStream(bucket_store(file.root), file.path, file.size), READ_BYTES)
    elif file.kind == "hub":
        with dataset_file(file.root, file.stamp, file.path).open("rb") as stream:
            yield stream
    else:
        with _dvc_at_commit(file.root, file.stamp).open(file.path, "rb") as stream:
            yield stream


def _unchanged(file: SourceFile) -> None:
    stamp: str | None = file.stamp
    if file.kind == "local":
        stamp = local_stamp(Path(file.path))
    elif file.kind == "s3":
        info = bucket_store(file.root).stat(file.path)
        stamp = info.version if info else None
    if stamp != file.stamp:
        raise DataError(f"{file.name}: changed while it was being read; run again when no process writes to it")


@contextlib.contextmanager
def _speaking(file: SourceFile) -> Iterator[None]:
    """Translate exceptions of the libraries into Holdfast errors that name the file."""
    try:
        yield
    except CorruptFileError as error:
        if str(error).startswith(file.name):
            raise
        raise CorruptFileError(f"{file.name}: {error}", error.reason) from None
    except HoldfastError:
        raise
    except FileNotFoundError as error:
        remedy = "run `dvc pull` or check the DVC remote" if file.kind == "dvc" else "run again"
        raise MissingError(f"{file.name}: is gone ({error.strerror or error}); {remedy}") from None
    except PermissionError:
        raise AccessDeniedError(f"{file.name}: may not be read; change its permissions") from None
    except (*DAMAGE, EOFError) as error:
        kind = NAMES.get(file.compression, file.format)
        raise CorruptFileError(f"{file.name}: is not whole {kind} data ({error}); fetch it again") from None
    except Exception as error:
        if is_damage(error, file.compression):
            kind = NAMES[file.compression]
            raise CorruptFileError(f"{file.name}: is not whole {kind} data ({error}); fetch it again") from None
        if type(error).__module__.startswith("dvc"):
            raise MissingError(
                f"{file.name}: DVC cannot read it ({error}); run `dvc pull` or check the DVC remote"
            ) from None
        if isinstance(error, OSError) and error.errno in UNREADABLE:
            raise DataError(f"{file.name}: cannot be read ({error.strerror}); check its disk or mount") from None
        raise


def is_lfs_pointer(file: SourceFile) -> bool:
    """Whether an unreadable file is a Git LFS pointer, under any name."""
    if file.size >= LFS_POINTER_BYTES:
        return False
    with opened(file, decompress=False) as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


# Small files that the user names, such as a tokenizer or a chat template, from a path, a bucket or the Hub.


@overload
def read_user_file(path: str, field: str, limit: int, remedy: str = ...) -> bytes: ...
@overload
def read_user_file(path: str, field: str, limit: int, remedy: str = ..., *, missing: None) -> bytes | None: ...


def read_user_file(
    path: str,
    field: str,
    limit: int,
    remedy: str = "name an existing file",
    *,
    missing: Literal["refuse"] | None = "refuse",
) -> bytes | None:
    """The bytes of the file at `path`, which the spec's field `field` names, at most `limit`. With `missing=None` a
    missing file gives None. Raises MissingError, DataError, AccessDeniedError."""
    if in_bucket(path):
        scheme, _, rest = path.partition("://")
        bucket, _, key = rest.partition("/")
        try:
            check_key(key)
        except ValueError as error:
            raise DataError(f"{field}: {path}: {error}; {remedy}") from None
        store = bucket_store(f"{scheme}://{bucket}")
        info = store.stat(key)
        if info is not None:
            _bounded(path, field, info.size, limit, remedy)
            return read_bounded(store, key, limit)
    else:
        local = hub_file(path) if is_hub(path) else Path(path.removeprefix("file://")).expanduser()
        if local is not None and local.is_file():
            _bounded(path, field, local.stat().st_size, limit, remedy)
            return read_file_bounded(local, limit)
    if missing is None:
        return None
    problem = f" is no file (working directory {Path.cwd()})" if "://" not in path else " does not exist"
    raise MissingError(f"{field}: {path}{problem}; {remedy}")


def _bounded(path: str, field: str, size: int, limit: int, remedy: str) -> None:
    if size > limit:
        raise DataError(f"{field}: {path} has {size} bytes, more than {limit}; {remedy}")
