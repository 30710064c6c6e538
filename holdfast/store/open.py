"""Opening the store of a URL. The URL never contains credentials, endpoint or region."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from holdfast.spec.errors import DataError, Problem, SpecError
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.payload import check_key


def open_store(url: str, *, deadline: float = 60.0) -> Store:
    """The store at file:///path or s3://bucket/prefix. Nothing is read or written yet.

    `deadline`: seconds that one request may take, all retries included; a large object is many requests. S3's endpoint,
    region and credentials come the usual AWS way (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...). Raises SpecError for
    a URL that names no store.
    """
    parts = urlsplit(url)
    problem = None
    if parts.scheme not in ("file", "s3"):
        problem = ("is neither file:// nor s3://", "write file:///path or s3://bucket/prefix")
    elif "@" in parts.netloc or parts.query or parts.fragment:
        problem = ("carries credentials, a query or a fragment", "remove them; credentials come from the environment")
    elif parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        problem = ("is not an absolute path", "write file:///path, with three slashes")
    elif parts.scheme == "s3" and not parts.netloc:
        problem = ("names no bucket", "write s3://bucket/prefix")
    if problem is not None:
        location = f"{parts.scheme}://(hidden)" if "@" in url or parts.query else url
        raise SpecError([Problem("store", location, *problem)], "store")
    if parts.scheme == "file":
        from holdfast.store.file import FileStore

        return FileStore(Path(unquote(parts.path)), deadline=deadline)
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
