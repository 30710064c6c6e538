"""The store in a bucket of Google Cloud Storage (gs://) or a container of Azure Blob Storage (az://).

`obstore` speaks both protocols, renews credentials and repeats requests. This class adds what the interface of the
store promises beyond that: conditional writes whose lost replies count, whole objects, bounds, errors with a remedy.

Credentials come the usual way of each cloud: GOOGLE_APPLICATION_CREDENTIALS or the metadata server;
AZURE_STORAGE_ACCOUNT_NAME with a key, a SAS token, a workload identity or a managed identity.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions

from holdfast.spec.errors import MissingError, StoreRefusedError
from holdfast.store import parallel as parts
from holdfast.store.cloud_requests import CloudRequests
from holdfast.store.durable import Content, Stream
from holdfast.store.interface import STALE_SECONDS, WHOLE_BYTES, ConflictError, Data, ObjectInfo, Read
from holdfast.store.parallel import in_parallel, read_many
from holdfast.store.payload import (
    Pieces,
    check_folder,
    check_key,
    check_prefix,
    check_range,
    conflict,
    filled,
    size_of,
    too_large,
    too_short,
    views,
    window,
)

WRITER = "holdfast_writer"  # metadata of conditional writes; Azure wants an identifier
WHOLE_PUT_BYTES = 8 * 2**20  # larger objects are written in parts
CONCURRENT_PARTS = 4
PAGE_KEYS = 1000  # of a listing, in memory

Meta = Mapping[str, Any]

_checked: set[str] = set()  # addresses other than the clouds' own that hold conditional writes


class CloudStore:
    """Objects under `prefix` in the bucket or container `bucket`. `scheme`: gs or az. `deadline`: seconds that one
    request may take, all retries included."""

    def __init__(self, scheme: str, bucket: str, prefix: str = "", *, deadline: float = 60.0) -> None:
        self.scheme, self.bucket = scheme, bucket
        self.prefix = f"{check_key(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._requests = CloudRequests(scheme, bucket, self.prefix, self.url, deadline)
        self._plain = self._requests.client()

    @property
    def url(self) -> str:
        """The root: gs://bucket/prefix or az://container/prefix."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"CloudStore({self.url!r})"

    def put(self, key: str, data: Data) -> None:
        """Write an object, replacing any former one."""
        pieces = views(data)
        self._write("put", check_key(key), size_of(pieces), lambda: iter(pieces))

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken; True if it now holds exactly `data`."""
        pieces = views(data)
        self._require_conditions()
        try:
            self._put_whole("put_if_absent", check_key(key), pieces, "create")
        except ConflictError:
            return self._holds(key, pieces)
        return True

    def compare_and_swap(self, key: str, data: Data, expected: str | None) -> str:
        """Replace an object whose version is `expected` (None: absent); the version is Google's generation or Azure's
        entity tag."""
        writer = uuid.uuid4().hex
        condition: Any = "create"
        if expected is not None:
            condition = {"version": expected} if self.scheme == "gs" else {"e_tag": f'"{expected}"'}
        self._require_conditions()
        try:
            return self._put_whole("compare_and_swap", check_key(key), views(data), condition, writer)
        except (ConflictError, MissingError):
            found = self._found("compare_and_swap", key)
            if found is not None and found.attributes.get(WRITER) == writer:
                return self._version(found.meta)  # an earlier attempt of this very call; its reply was lost
            raise conflict(key, self._version(found.meta) if found else None, expected) from None

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """Read an object, or `length` bytes of it from `start`."""
        check_range(start, length)
        if length is not None:
            return filled(length, lambda view: self.read_into(key, start, view))
        check_key(key)

        def read() -> bytes:
            meta = self._meta("get", key)
            size = meta["size"]
            if start > size:
                raise too_short(key, size, start, 0)
            if size - start > most:
                raise too_large(key, size - start, most)
            return filled(size - start, lambda view: self._fill(key, start, view, meta["e_tag"]))

        return self._requests.repeated(read, ConflictError)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill `target` with the object's bytes from `start`."""
        check_range(start, None)
        self._fill(check_key(key), start, target.cast("B"))

    def read_many(self, reads: Iterable[Read]) -> None:
        """Carry out many reads concurrently."""
        read_many(self.read_into, reads)

    def get_versioned(self, key: str, *, most: int = WHOLE_BYTES) -> tuple[bytes, str]:
        """Read a whole object together with the version that `compare_and_swap` expects."""
        check_key(key)

        def read() -> tuple[bytes, str]:
            found = obstore.get(self._plain, key)
            if found.meta["size"] > most:
                raise too_large(key, found.meta["size"], most)
            return bytes(found.bytes()), self._version(found.meta)

        return self._requests.send("get_versioned", key, read)

    def stat(self, key: str) -> ObjectInfo | None:
        """The metadata of an object, without reading it; None if it does not exist."""
        try:
            return self._info(self._meta("stat", check_key(key)))
        except MissingError:
            return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix` and comes after `after`, in the order of their keys. Azure cannot
        begin after a key: it lists all of the folder."""
        folder = check_prefix(prefix).rpartition("/")[0]
        pages: Any = None

        def next_page() -> Any:
            nonlocal pages
            if pages is None:
                pages = obstore.list(self._plain, folder or None, offset=after or None, chunk_size=PAGE_KEYS)
            try:
                return next(pages, None)
            except Exception:
                pages = None  # after a failure it would end early: another one begins after the last key
                raise

        while page := self._requests.send("list", prefix, next_page):
            for meta in page:
                key = meta["path"]
                if key.startswith(prefix):
                    if key > after and not key.startswith("."):
                        yield self._info(meta)
                elif key > prefix:
                    return
            after = max(after, page[-1]["path"])

    def folders(self, prefix: str) -> Iterator[str]:
        """The names of the folders whose path begins with `prefix`, in order."""
        folder = check_prefix(prefix).rpartition("/")[0]
        found = self._requests.send("folders", prefix, lambda: obstore.list_with_delimiter(self._plain, folder or None))
        for path in sorted(found["common_prefixes"]):
            name = path.rstrip("/").rpartition("/")[2]
            if path.startswith(prefix) and not name.startswith("."):
                yield name

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        try:
            self._requests.send("delete", check_key(key), lambda: obstore.delete(self._plain, key))
        except MissingError:
            return

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove several objects, some at a time."""
        in_parallel(self.delete, [check_key(key) for key in keys])

    def end_abandoned(self, folder: str, older_than: float = STALE_SECONDS) -> int:  # noqa: ARG002
        """Nothing: Azure drops unfinished writes after a week, and a bucket of Google by its lifecycle rule."""
        check_folder(folder)
        return 0

    def put_stream(self, key: str, size: int, content: Content) -> None:
        """Write an object while its bytes are produced, with only a few parts in memory."""

        def pieces() -> Iterator[memoryview]:
            stream = Stream(key, size, content)
            for start in range(0, max(size, 1), parts.PART_BYTES):
                yield from stream.part(start, min(parts.PART_BYTES, size - start))

        self._write("put_stream", check_key(key), size, pieces)

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, streaming, with only a few parts in memory."""
        check_key(key)
        if not path.is_file():
            raise MissingError(f"upload {key}: {path}: no such file")

        def content() -> Iterator[bytes]:
            with path.open("rb") as file:
                while data := file.read(parts.PART_BYTES):
                    yield data

        self.put_stream(key, path.stat().st_size, content)

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, streaming; the file appears only when it is whole."""
        meta = self._meta("download", check_key(key))
        fill = partial(self._fill_part, key, version=meta["e_tag"])
        parts.download(path, key, meta["size"], fill)

    def local_path(self, key: str) -> Path | None:
        """None: an object in a bucket has no file on this machine."""
        check_key(key)
        return None

    # Requests

    def _write(self, name: str, key: str, size: int, content: Callable[[], Iterator[memoryview]]) -> None:
        if size <= WHOLE_PUT_BYTES:
            self._put_whole(name, key, list(content()), "overwrite")
            return

        failures: list[BaseException] = []

        part_bytes = max(parts.PART_BYTES, -(-size // parts.MOST_PARTS))
        client = self._requests.client(part_bytes)

        def write() -> None:
            try:
                obstore.put(
                    client,
                    key,
                    _kept(content(), failures),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=CONCURRENT_PARTS,
                )
            except Exception:
                if not failures:
                    raise

        self._requests.send(name, key, write)
        if failures:  # what makes the bytes failed, and no part of them shows
            raise failures[0]

    def _put_whole(self, name: str, key: str, pieces: Pieces, condition: Any, writer: str = "") -> str:
        """Write an object in one request. Returns its version. Raises ConflictError if the condition does not hold."""
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        attributes: Any = {WRITER: writer} if writer else None
        client = self._requests.client(len(content))
        result = self._requests.send(
            name,
            key,
            lambda: obstore.put(client, key, content, mode=condition, attributes=attributes, use_multipart=False),
        )
        return self._version(result)

    def _fill(self, key: str, start: int, target: memoryview, version: str | None = None) -> None:
        if not target.nbytes:
            size = self._meta("read_into", key)["size"]
            if start > size:
                raise too_short(key, size, start, 0)
            return
        offsets = range(0, target.nbytes, parts.PART_BYTES)
        in_parallel(lambda at: self._fill_part(key, start + at, target[at : at + parts.PART_BYTES], version), offsets)

    def _fill_part(self, key: str, start: int, target: memoryview, version: str | None) -> None:
        client = self._requests.client(target.nbytes)

        def read() -> None:
            options: Any = {"range": (start, start + target.nbytes)}
            if version:
                options["if_match"] = version
            try:
                data = memoryview(obstore.get(client, key, options=options).bytes())
            except exceptions.GenericError:
                if (size := obstore.head(self._plain, key)["size"]) <= start:  # no server has a range beyond the end
                    raise too_short(key, size, start, target.nbytes) from None
                raise
            if data.nbytes != target.nbytes:
                raise too_short(key, start + data.nbytes, start, target.nbytes)
            target[:] = data

        self._requests.send("read_into", key, read)

    def _holds(self, key: str, pieces: Pieces) -> bool:
        """Whether the object has exactly these bytes."""
        try:
            meta = self._meta("put_if_absent", key)
        except MissingError:
            return False
        if meta["size"] != size_of(pieces):
            return False
        for start in range(0, size_of(pieces), parts.PART_BYTES):
            expected = b"".join(window(pieces, start, parts.PART_BYTES))
            stored = memoryview(bytearray(len(expected)))
            self._fill_part(key, start, stored, meta["e_tag"])
            if stored != expected:
                return False
        return True

    def _found(self, name: str, key: str) -> Any:
        """The object with its metadata, without its content; None if it does not exist."""
        try:
            return self._requests.send(name, key, lambda: obstore.get(self._plain, key, options={"head": True}))
        except MissingError:
            return None

    def _meta(self, name: str, key: str) -> Meta:
        return self._requests.send(name, key, lambda: obstore.head(self._plain, key))

    def _version(self, meta: Meta) -> str:
        version = meta["version" if self.scheme == "gs" else "e_tag"]
        if not version:
            raise StoreRefusedError(f"{self.url}: this server gives objects no version; use another store")
        return str(version).strip('"')  # Azure's listings have no quotation marks

    def _info(self, meta: Meta) -> ObjectInfo:
        """The description of an object. Its version is the entity tag: Google's listings have no generation."""
        return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp(), str(meta["e_tag"]).strip('"'))

    def _require_conditions(self) -> None:
        """Refuse a server that ignores conditions, on which two attempts could both own a run. The clouds hold them;
        other addresses are tried once for each process. Raises StoreRefusedError."""
        if not self._requests.address or self._requests.address in _checked:
            return
        key = f"probe-{uuid.uuid4().hex}"
        try:
            self._put_whole("probe", key, views(b"first"), "create")
            self._put_whole("probe", key, views(b"second"), "create")
        except ConflictError:
            _checked.add(self._requests.address)
        else:
            raise StoreRefusedError(
                f"{self._requests.address}: this server ignores conditional writes, so two attempts could both own "
                "a run; name another store"
            )
        finally:
            self.delete(key)


def _kept(content: Iterator[memoryview], failures: list[BaseException]) -> Iterator[memoryview]:
    """The content, with what fails in making it in `failures`: obstore would raise another error."""
    try:
        yield from content
    except GeneratorExit:  # a request failed, and nothing reads the rest
        raise
    except BaseException as failure:
        failures.append(failure)
        raise
