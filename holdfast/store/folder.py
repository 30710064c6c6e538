"""Objects as the files of one local folder, for code that reads folders, such as an exported model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from holdfast.spec.errors import DataError
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.payload import check_key


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
    listed = (info for info in store.list(prefix) if not info.key.endswith("/"))  # consoles mark folders this way
    found = [info for info in listed if wanted(info.key.removeprefix(prefix))]
    if not found:
        return None
    for info in found:
        try:
            check_key(info.key)
        except ValueError as error:
            raise DataError(f"{store.url}: {error}; delete that object") from None
    first = store.local_path(found[0].key)
    if first is not None:
        return first.parents[found[0].key.removeprefix(prefix).count("/")]
    folder = copies / _fingerprint(store, found)
    for info in found:
        path = folder / info.key.removeprefix(prefix)
        if not path.is_file() or path.stat().st_size != info.size:
            store.download(info.key, path)
    return folder


def _fingerprint(store: Store, found: list[ObjectInfo]) -> str:
    lines = [store.url, *(f"{info.key} {info.version}" for info in found)]
    return blake3("\n".join(lines).encode()).hexdigest()[:16]
