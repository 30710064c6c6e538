"""Small files that the user names, such as a tokenizer or a chat template, from a path, a bucket or the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

from holdfast.corpus.files import bucket_store
from holdfast.model.hub import hub_file, is_hub
from holdfast.spec.errors import DataError, MissingError
from holdfast.store.json_reading import read_bounded, read_file_bounded
from holdfast.store.payload import check_key


@overload
def read_user_file(path: str, field: str, limit: int, remedy: str = ...) -> bytes: ...
@overload
def read_user_file(path: str, field: str, limit: int, remedy: str = ..., *, missing: None) -> bytes | None: ...


def read_user_file(
    path: str,
    field: str,
    limit: int,
    remedy: str = "name a file that is there",
    *,
    missing: Literal["refuse"] | None = "refuse",
) -> bytes | None:
    """The bytes of the file at `path`, which the spec's field `field` names, at most `limit`. With `missing=None` a
    missing file gives None. Raises MissingError, DataError, AccessDeniedError."""
    if path.startswith("s3://"):
        bucket, _, key = path.removeprefix("s3://").partition("/")
        try:
            check_key(key)
        except ValueError as error:
            raise DataError(f"{field}: {path}: {error}; {remedy}") from None
        store = bucket_store(f"s3://{bucket}")
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
    where = f" is no file (working directory {Path.cwd()})" if "://" not in path else " does not exist"
    raise MissingError(f"{field}: {path}{where}; {remedy}")


def _bounded(path: str, field: str, size: int, limit: int, remedy: str) -> None:
    if size > limit:
        raise DataError(f"{field}: {path} has {size} bytes, more than {limit}; {remedy}")
