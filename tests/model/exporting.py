"""A model as a folder in the Hugging Face layout, for tests that read one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from holdfast.model import export
from holdfast.spec.model import Model


def write_hugging_face(
    folder: Path,
    shape: Model,
    vocabulary: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = export.MAX_SHARD_BYTES,
    **options: Any,
) -> list[str]:
    """Write the export of these tensors into `folder`. Returns the names of its files."""
    by_name = dict(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    with patch.object(export, "MAX_SHARD_BYTES", max_shard_bytes):
        files = export.export_files(
            shape, vocabulary, lambda name, *rows: iter(by_name[name][slice(*rows or (None,))].split(3)), **options
        )
    for file in files:
        (folder / file.name).write_bytes(b"".join(file.content()))
    return [file.name for file in files]
