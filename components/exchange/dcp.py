"""torch's distributed checkpoints (`torch.distributed.checkpoint`): written so that `dcp.load` reads them, and read.

Written: every tensor under its canonical name, in one file a part, because DCP keeps the last part of each tensor of a
file in memory. Read: the metadata by an unpickler that knows DCP's own types only, the parts by
`torch.load(weights_only=True)`, each as large as whoever wrote it made it.
"""

from __future__ import annotations

import io
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.components.checkpoint import Checkpoint, TensorBox
from holdfast.components.checkpoint.box import DTYPES
from holdfast.components.exchange.take_in import MOMENTS
from holdfast.components.exchange.unpickle import unpickled
from holdfast.components.spec.errors import DataError, MissingError

PART_BYTES = 128 * 2**20  # of a tensor in one file
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(_METADATA, name): getattr(metadata, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "Path"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}  # fmt: skip


def export_dcp(checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Write a checkpoint into an empty `folder`, its scalars as tensors beside the others. Raises DataError when there
    is something in it, DamageError for what cannot be verified."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty: name one that is, or that does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    scalars = {name: torch.tensor(value) for name, value in checkpoint.manifest.scalars.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        dcp.save({}, storage_writer=writer, planner=_Streaming(checkpoint, scalars, progress), no_dist=True)


class _Streaming(DefaultSavePlanner):
    """Plans parts of tensors, and reads each when it is about to be written."""

    def __init__(
        self, checkpoint: Checkpoint, scalars: dict[str, torch.Tensor], progress: Callable[[int, int], None]
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._checkpoint, self._scalars, self._progress = checkpoint, scalars, progress
        self._total = sum(info.elements * info.itemsize for info in checkpoint.tensors.values())
        self._done = 0

    def create_local_plan(self) -> SavePlan:
        """See SavePlanner."""
        items = [_item(name, tuple(value.shape), value.dtype, 0, None) for name, value in self._scalars.items()]
        for name, info in self._checkpoint.tensors.items():
            rows = max(1, PART_BYTES // max(1, prod(info.shape[1:]) * info.itemsize))
            for first in range(0, info.shape[0] if info.shape else 1, rows):
                items.append(_item(name, info.shape, DTYPES[info.dtype], first, rows))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See SavePlanner."""
        name, told = write_item.index.fqn, write_item.tensor_data
        if name in self._scalars:
            return self._scalars[name]
        assert told is not None
        data = torch.empty(tuple(told.chunk.sizes), dtype=told.properties.dtype)
        self._checkpoint.fill([TensorBox(name, tuple(told.size), tuple(told.chunk.offsets), data)])
        self._done += data.nbytes
        self._progress(self._done, self._total)
        return data


def _item(name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int, rows: int | None) -> WriteItem:
    offset, size = [0] * len(shape), list(shape)
    if shape and rows is not None:
        offset[0], size[0] = first, min(rows, shape[0] - first)
    chunk = metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
    return WriteItem(
        metadata.MetadataIndex(name, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, metadata.TensorProperties(dtype), torch.Size(shape)),
    )


class DistributedCheckpoint:
    """See Source. Knows tensors by their canonical names, or by names that end so and say whose moment they are, as
    torch's own state dicts do: `model.<name>`, `optim.state.<name>.exp_avg`."""

    def __init__(self, folder: Path) -> None:
        """Raises MissingError or DataError."""
        self.where, self._folder = str(folder), folder
        path = folder / ".metadata"
        if not path.is_file():
            raise MissingError(f"{path}: there is no such file; name the folder that dcp.save wrote")
        found = unpickled(path.read_bytes(), str(path), _ALLOWED)
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise DataError(f"{path}: is not the metadata of a distributed checkpoint")
        self._tensors: dict[str, metadata.TensorStorageMetadata] = {
            name: told
            for name, told in found.state_dict_metadata.items()
            if isinstance(told, metadata.TensorStorageMetadata)
        }
        self._files = {(index.fqn, tuple(index.offset or ())): told for index, told in found.storage_data.items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See Source."""
        key = self._key(name)
        return None if key is None else tuple(self._tensors[key].size)

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """See Source."""
        key = self._key(name)
        assert key is not None
        told = self._tensors[key]
        for chunk in told.chunks:
            data = self._read(key, tuple(chunk.offsets))
            if tuple(data.shape) != tuple(chunk.sizes) or not data.is_floating_point():
                raise DataError(f"{self.where}: {key} holds {data.dtype} {list(data.shape)} at {list(chunk.offsets)}")
            yield TensorBox(name, tuple(told.size), tuple(chunk.offsets), data.detach())

    def _key(self, name: str) -> str | None:
        """What a tensor is called there. Raises DataError where several names fit."""
        if name in self._tensors:
            return name
        moment = next((prefix for prefix in MOMENTS if name.startswith(prefix)), "")
        weight, kind = name.removeprefix(moment), moment.removeprefix("optimizer.").rstrip(".")
        if moment:
            fitting = [key for key in self._tensors if _ends(key, f"{weight}.{kind}") or _ends(key, f"{kind}.{weight}")]
        else:
            fitting = [key for key in self._tensors if _ends(key, weight) and not re.search(r"\bexp_avg", key)]
        if len(fitting) > 1:
            raise DataError(f"{self.where}: {name} may be any of {', '.join(sorted(fitting)[:5])}")
        return fitting[0] if fitting else None

    def _read(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        told = self._files.get((key, offset)) or (self._files.get((key, ())) if not any(offset) else None)
        if told is None:
            raise DataError(f"{self.where}: nothing says where {key} at {list(offset)} lies")
        if Path(told.relative_path).name != told.relative_path or told.relative_path in (".", ".."):
            raise DataError(f"{self.where}: {key} is said to lie in {told.relative_path!r}, outside of the folder")
        if told.transform_descriptors:
            raise DataError(f"{self.where}: {key} is transformed ({told.transform_descriptors}); save it without")
        try:
            with (self._folder / told.relative_path).open("rb") as file:
                file.seek(told.offset)
                stored = file.read(told.length)
            read = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch.load raises what it likes for a torn file
            raise DataError(f"{self._folder / told.relative_path}: {key} cannot be read: {error}") from None
        if not isinstance(read, torch.Tensor):
            raise DataError(f"{self._folder / told.relative_path}: {key} is no tensor")
        return read


def _ends(key: str, name: str) -> bool:
    return key == name or key.endswith("." + name)
