"""Opening the store of a URL. The URL never contains credentials, endpoint or region."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from holdfast.spec.errors import DataError, Problem, SpecError
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.payload import check_key

BUCKETS = ("s3", "gs", "az")


def in_bucket(url: str) -> bool:
    """Whether a URL names objects in a bucket."""
    return url.startswith(tuple(f"{scheme}://" for scheme in BUCKETS))


def open_store(url: str, *, deadline: float = 60.0) -> Store:
    """The store at file:///path, s3://bucket/prefix, gs://bucket/prefix (Google Cloud Storage) or az://container/prefix
    (Azure Blob Storage). Nothing is read or written yet.

    `deadline`: seconds that one request may take, all retries included; a large object is many requests. Endpoint,
    region, account and credentials come the usual way of each (AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS,
    AZURE_STORAGE_ACCOUNT_NAME, ...). Raises SpecError for a URL that names no store.
    """
    parts = urlsplit(url)
    problem = None
    if parts.scheme not in ("file", *BUCKETS):
        problem = ("is neither file:// nor a bucket", "write file:///path, s3://, gs:// or az://bucket/prefix")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        problem = ("carries credentials, a query or a fragment", "remove them; credentials come from the environment")
    elif parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        problem = ("is not an absolute path", "write file:///path, with three slashes")
    elif parts.scheme != "file" and not parts.netloc:
        problem = ("names no bucket", f"write {parts.scheme}://bucket/prefix")
    if problem is not None:
        location = f"{parts.scheme}://(hidden)" if "@" in url or parts.query else url
        raise SpecError([Problem("store", location, *problem)], "store")
    if parts.scheme == "file":
        from holdfast.store.file import FileStore

        return FileStore(Path(unquote(parts.path)), deadline=deadline)
    if parts.scheme != "s3":
        from holdfast.store.cloud import CloudStore

        return CloudStore(parts.scheme, parts.netloc, unquote(parts.path), deadline=deadline)
    from holdfast.store.s3.store import S3Store

    return S3Store(parts.netloc, unquote(parts.path), deadline=deadline)


# Objects as the files of one local folder, for code that reads folders, such as an exported model's.


def local_folder(
    store: Store,
    prefix: str,
    copies: Path,
    wanted: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
) -> Path | None:
    """The folder with the objects under `prefix`. For a local store it is the folder itself. Otherwise it is a folder
    in `copies` with copies of the `wanted` objects, which is reused while the objects are the same. None without
    objects.

    Raises DataError for an object whose key is no path below the folder.
    """
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    objects = (info for info in store.list(prefix) if not info.key.endswith("/"))  # consoles mark folders this way
    infos = [info for info in objects if wanted(info.key.removeprefix(prefix))]
    if not infos:
        return None
    for info in infos:
        try:
            check_key(info.key)
        except ValueError as error:
            raise DataError(f"{store.url}: {error}; delete that object") from None
    first = store.local_path(infos[0].key)
    if first is not None:
        return first.parents[infos[0].key.removeprefix(prefix).count("/")]
    folder = copies / _fingerprint(store, infos)
    for info in infos:
        path = folder / info.key.removeprefix(prefix)
        if not path.is_file() or path.stat().st_size != info.size:
            store.download(info.key, path)
    return folder


def _fingerprint(store: Store, found: list[ObjectInfo]) -> str:
    lines = [store.url, *(f"{info.key} {info.version}" for info in found)]
    return blake3("\n".join(lines).encode()).hexdigest()[:16]
