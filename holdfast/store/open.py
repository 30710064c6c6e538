"""Opening the store of a URL. The URL never contains credentials, endpoint or region."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.spec.errors import Problem, SpecError
from holdfast.store.interface import Store


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
        shown = f"{parts.scheme}://(hidden)" if "@" in url or parts.query else url
        raise SpecError([Problem("store", shown, *problem)], "store")
    if parts.scheme == "file":
        from holdfast.store.file import FileStore

        return FileStore(Path(unquote(parts.path)), deadline=deadline)
    from holdfast.store.s3.store import S3Store

    return S3Store(parts.netloc, unquote(parts.path), deadline=deadline)
