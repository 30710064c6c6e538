"""The store in a bucket of Google Cloud Storage (gs://) or a container of Azure Blob Storage (az://).

`obstore` speaks both protocols, renews credentials and repeats requests. This class adds what the interface of the
store promises beyond that: conditional writes whose lost replies count, whole objects, bounds, errors with a remedy.

Credentials come the usual way of each cloud: GOOGLE_APPLICATION_CREDENTIALS or the metadata server;
AZURE_STORAGE_ACCOUNT_NAME with a key, a SAS token, a workload identity or a managed identity.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore

from holdfast.runtime import retry
from holdfast.runtime.secrets import HIDDEN, redact
from holdfast.spec.errors import AccessDeniedError, MissingError, StoreRefusedError, StoreUnreachableError
from holdfast.store import parallel as parts
from holdfast.store.durable import Content, Stream, whole_file
from holdfast.store.interface import STALE_SECONDS, WHOLE_BYTES, ConflictError, Data, ObjectInfo, Read
from holdfast.store.parallel import in_parallel, read_many
from holdfast.store.payload import (
    Pieces,
    check_folder,
    check_key,
    check_prefix,
    check_range,
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
CONNECT_SECONDS = 10
FREE_BYTES = 4 * 2**20  # bodies up to this size get no more time than a request without one
LEAST_RATE = 2**18  # bytes per second of a larger body, at least
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between requests that failed
WRITES = ("put", "put_if_absent", "put_stream", "probe")
ENDPOINTS = {"gs": ("GOOGLE_BASE_URL",), "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")}

_BYTES = re.compile(r"\[\d+(?:, \d+)+\]")

Result = TypeVar("Result")
Meta = Mapping[str, Any]

_process: list[int] = []  # the id of the process whose threads send the requests
_checked: set[str] = set()  # addresses other than the clouds' own that hold conditional writes


class CloudStore:
    """Objects under `prefix` in the bucket or container `bucket`. `scheme`: gs or az. `deadline`: seconds that one
    request may take, all retries included."""

    def __init__(self, scheme: str, bucket: str, prefix: str = "", *, deadline: float = 60.0) -> None:
        self.scheme, self.bucket, self._deadline = scheme, bucket, deadline
        self.prefix = f"{check_key(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._address = next((found for name in ENDPOINTS[scheme] if (found := os.environ.get(name))), "")
        self._clients: dict[int, Any] = {}
        self._store = self._client()

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
            current = self._version(found.meta) if found else "absent"
            raise ConflictError(
                f"{key}: version is {current}, not {expected or 'absent'}: another writer was first; "
                "read it again and decide anew"
            ) from None

    def get(self, key: str, start: int = 0, length: int | None = None, *, most: int = WHOLE_BYTES) -> bytes:
        """Read an object, or `length` bytes of it from `start`."""
        check_range(start, length)
        if length is not None:
            return filled(length, lambda view: self.read_into(key, start, view))
        check_key(key)

        def read(_attempt: int) -> bytes:
            meta = self._meta("get", key)
            size = meta["size"]
            if start > size:
                raise too_short(key, size, start, 0)
            if size - start > most:
                raise too_large(key, size - start, most)
            return filled(size - start, lambda view: self._fill(key, start, view, meta["e_tag"]))

        return retry.retried(read, _is_conflict, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seconds=self._deadline)

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
            found = obstore.get(self._store, key)
            if found.meta["size"] > most:
                raise too_large(key, found.meta["size"], most)
            return bytes(found.bytes()), self._version(found.meta)

        return self._request("get_versioned", key, read)

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
                pages = obstore.list(self._store, folder or None, offset=after or None, chunk_size=PAGE_KEYS)
            try:
                return next(pages, None)
            except Exception:
                pages = None  # after a failure it would end early: another one begins after the last key
                raise

        while page := self._request("list", prefix, next_page):
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
        found = self._request("folders", prefix, lambda: obstore.list_with_delimiter(self._store, folder or None))
        for path in sorted(found["common_prefixes"]):
            name = path.rstrip("/").rpartition("/")[2]
            if path.startswith(prefix) and not name.startswith("."):
                yield name

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""
        try:
            self._request("delete", check_key(key), lambda: obstore.delete(self._store, key))
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
        size, version = meta["size"], meta["e_tag"]
        with whole_file(path, key) as descriptor:
            os.truncate(descriptor, size)

            def fetch(start: int) -> None:
                block = memoryview(bytearray(min(parts.PART_BYTES, size - start)))
                self._fill_part(key, start, block, version)
                while block.nbytes:
                    count = os.pwrite(descriptor, block, start)
                    start, block = start + count, block[count:]

            in_parallel(fetch, range(0, size, parts.PART_BYTES))

    def local_path(self, key: str) -> Path | None:
        """None: an object in a bucket has no file on this machine."""
        check_key(key)
        return None

    # Requests

    def _client(self, size: int = 0) -> Any:
        """The client for requests with a body of at most `size` bytes. It gives a larger body more time, at the least
        rate; its library has one limit for all requests of a client."""
        doublings = (size // FREE_BYTES).bit_length()
        if doublings not in self._clients:
            seconds = self._deadline / 3  # so that a lost reply leaves time for another request
            more = (FREE_BYTES << doublings) / LEAST_RATE if doublings else 0.0
            options: dict[str, Any] = {
                "client_options": {
                    "timeout": timedelta(seconds=seconds + more),
                    "connect_timeout": timedelta(seconds=min(seconds, CONNECT_SECONDS)),
                    "allow_http": self._address.startswith("http://"),
                },
                "retry_config": {"retry_timeout": timedelta(seconds=seconds)},
            }
            make = GCSStore if self.scheme == "gs" else AzureStore
            try:
                self._clients[doublings] = make(self.bucket, prefix=self.prefix.rstrip("/") or None, **options)
            except exceptions.BaseError as error:
                raise StoreRefusedError(f"{self.url}: {_text(error)}; check the variables of the credentials") from None
        return self._clients[doublings]

    def _write(self, name: str, key: str, size: int, content: Callable[[], Iterator[memoryview]]) -> None:
        if size <= WHOLE_PUT_BYTES:
            self._put_whole(name, key, list(content()), "overwrite")
            return

        failures: list[BaseException] = []

        part_bytes = max(parts.PART_BYTES, -(-size // parts.MOST_PARTS))
        client = self._client(part_bytes)

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

        self._request(name, key, write)
        if failures:  # what makes the bytes failed, and no part of them shows
            raise failures[0]

    def _put_whole(self, name: str, key: str, pieces: Pieces, condition: Any, writer: str = "") -> str:
        """Write an object in one request. Returns its version. Raises ConflictError if the condition does not hold."""
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        attributes: Any = {WRITER: writer} if writer else None
        client = self._client(len(content))
        result = self._request(
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
        client = self._client(target.nbytes)

        def read() -> None:
            options: Any = {"range": (start, start + target.nbytes)}
            if version:
                options["if_match"] = version
            try:
                data = memoryview(obstore.get(client, key, options=options).bytes())
            except exceptions.GenericError:
                if (size := obstore.head(self._store, key)["size"]) <= start:  # no server has a range beyond the end
                    raise too_short(key, size, start, target.nbytes) from None
                raise
            if data.nbytes != target.nbytes:
                raise too_short(key, start + data.nbytes, start, target.nbytes)
            target[:] = data

        self._request("read_into", key, read)

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
            return self._request(name, key, lambda: obstore.get(self._store, key, options={"head": True}))
        except MissingError:
            return None

    def _meta(self, name: str, key: str) -> Meta:
        return self._request(name, key, lambda: obstore.head(self._store, key))

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
        if not self._address or self._address in _checked:
            return
        key = f"probe-{uuid.uuid4().hex}"
        try:
            self._put_whole("probe", key, views(b"first"), "create")
            self._put_whole("probe", key, views(b"second"), "create")
        except ConflictError:
            _checked.add(self._address)
        else:
            raise StoreRefusedError(
                f"{self._address}: this server ignores conditional writes, so two attempts could both own a run; "
                "name another store"
            )
        finally:
            self.delete(key)

    def _request(self, name: str, key: str, send: Callable[[], Result]) -> Result:
        """The result of a request, which is repeated while the store does not answer."""
        return retry.retried(
            lambda _attempt: self._send(name, key, send),
            lambda failure: isinstance(failure, StoreUnreachableError),
            first=FIRST_PAUSE,
            longest=LONGEST_PAUSE,
            seconds=self._deadline,
        )

    def _send(self, name: str, key: str, send: Callable[[], Result]) -> Result:
        _process[:] = _process or [os.getpid()]
        if _process != [os.getpid()]:
            raise StoreRefusedError(f"{self.url}: this process was forked after requests to it; start it anew (spawn)")
        try:
            return send()
        except (exceptions.NotFoundError, FileNotFoundError):
            if name in WRITES:
                raise StoreRefusedError(f"{name} {key}: there is no {self.scheme}://{self.bucket}; create it") from None
            raise MissingError(f"{name} {key}: no such object in {self.url}") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise ConflictError(f"{name} {key}: {_text(error)}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise AccessDeniedError(
                f"{name} {key} in {self.url}: {_text(error)}; give these credentials get, put, list and delete"
            ) from None
        except exceptions.BaseError as error:
            raise StoreUnreachableError(
                f"{name} {key} in {self.url}: {_text(error)}; check the address, the network and the credentials"
            ) from None


def _is_conflict(failure: BaseException) -> bool:
    """Whether an object changed while it was read."""
    return isinstance(failure, ConflictError)


def _kept(content: Iterator[memoryview], failures: list[BaseException]) -> Iterator[memoryview]:
    """The content, with what fails in making it in `failures`: obstore would raise another error."""
    try:
        yield from content
    except GeneratorExit:  # a request failed, and nothing reads the rest
        raise
    except BaseException as failure:
        failures.append(failure)
        raise


def _text(error: BaseException) -> str:
    """The first line of an error of obstore, without its Debug form, and without bytes: a private key whose lines are
    wrong is in the error as a list of numbers."""
    line = _BYTES.sub(HIDDEN, str(error).partition("\n\n")[0].strip().replace("\n", " "))
    return redact(line)[:500]
