"""Objects as the files of one folder, for what reads folders: an exported model, say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from components.spec.errors import MissingError
from components.store.interface import ObjectInfo, Store


def local_folder(
    store: Store,
    prefix: str,
    copies: Path,
    wanted: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
) -> Path:
    """The folder with the objects under `prefix`: where they lie, or copies of the `wanted` ones in a folder of their
    own in `copies`, which is used again while the objects are the same. Raises MissingError when there are none."""
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    found = [info for info in store.list(prefix) if wanted(info.key.removeprefix(prefix))]
    if not found:
        raise MissingError(f"{store.url}/{prefix}: there is nothing")
    first = store.local_path(found[0].key)
    if first is not None:
        return first.parents[found[0].key.removeprefix(prefix).count("/")]
    folder = copies / _fingerprint(store, found)
    for info in found:
        path = folder / info.key.removeprefix(prefix)
        if not path.is_file() or path.stat().st_size != info.size:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(info.key, path)
    return folder


def _fingerprint(store: Store, found: list[ObjectInfo]) -> str:
    lines = [store.url, *(f"{info.key} {info.version}" for info in found)]
    return blake3("\n".join(lines).encode()).hexdigest()[:16]
