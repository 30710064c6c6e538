"""torch's distributed checkpoints (`torch.distributed.checkpoint`): written for `dcp.load`, and read.

Written: every tensor under its canonical name, one file per part, because DCP keeps the last part of each tensor of a
file in memory. Read: metadata and parts as plain records (`pickle_records`, `torch_file`), some rows at a time, from
regular files inside the folder.
"""

import io
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.checkpoint import Checkpoint, TensorBox
from holdfast.checkpoint.box import DTYPES as SAVED_DTYPES
from holdfast.exchange.import_checkpoint import BOX_BYTES, MOMENTS
from holdfast.exchange.pickle_records import MOST_BYTES, Table, read_pickle, record_of
from holdfast.exchange.torch_file import DTYPES, StoredTensor, file_inside, numbers, read_tensors
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, read_file_bounded
from holdfast.store.payload import DCP_METADATA

PART_BYTES = 128 * 2**20  # of a tensor in one file
_METADATA = "torch.distributed.checkpoint.metadata"
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_METADATA_CLASSES = tuple(
    """
    Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties BytesStorageMetadata
    ChunkStorageMetadata _MEM_FORMAT_ENCODING
    """.split()
)
_PATH_CLASSES = ("Path", "PosixPath", "WindowsPath")
# The names that a `.metadata` may contain. They are strings: none of them is looked up.
_NAMES = frozenset(
    {
        *(f"{_METADATA}.{name}" for name in _METADATA_CLASSES),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES),
        *DTYPES,
        _STORED,
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
    }
)
_SUFFIX_PARTS = 16  # of a name that ends in a canonical name
_NAME_CHARACTERS = 1000


def export_dcp(checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Write a checkpoint into an empty `folder`, with its scalars as additional tensors. Raises DataError if the
    folder is not empty, and DamageError for data that cannot be verified."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty: name one that is, or that does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    _write_dcp(checkpoint, dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1), progress)


def upload_dcp(checkpoint: Checkpoint, target: Store, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Write a checkpoint into a bucket, as `export_dcp` does.

    Each file is uploaded, and deleted on this machine, before the next one is written. `.metadata` comes last: without
    it there is no checkpoint. Repeat an interrupted upload. Raises DataError if the target has a distributed
    checkpoint, and DamageError for data that cannot be verified.
    """
    if target.stat(DCP_METADATA) is not None:
        raise DataError(f"{target.url} has a distributed checkpoint ({DCP_METADATA}): name another prefix")
    with temporary_folder("export") as folder:
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1, sync_files=False)
        writer.fs = _Uploading(target)
        _write_dcp(checkpoint, writer, progress)


class _Uploading(FileSystem):
    """Uploads each file when it is whole."""

    def __init__(self, target: Store) -> None:
        self._target = target

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """See FileSystemBase."""
        with super().create_stream(path, mode) as stream:
            yield stream
        if Path(path).suffix != ".tmp":  # it is renamed
            self._upload(Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """See FileSystemBase."""
        super().rename(path, new_path)
        self._upload(Path(new_path))

    def _upload(self, path: Path) -> None:
        self._target.upload(path, path.name)
        path.unlink()


def _write_dcp(checkpoint: Checkpoint, writer: dcp.FileSystemWriter, progress: Callable[[int, int], None]) -> None:
    scalars = {name: torch.tensor(value) for name, value in checkpoint.manifest.scalars.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the missing process group is intended
        try:
            dcp.save({}, storage_writer=writer, planner=_Streaming(checkpoint, scalars, progress), no_dist=True)
        except CheckpointException as error:  # torch wraps the error of a rank
            raise error.failures[0][0] from None


class _Streaming(DefaultSavePlanner):
    """Plans parts of tensors, and reads each part just before it is written."""

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
                items.append(_item(name, info.shape, SAVED_DTYPES[info.dtype], first, rows))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See SavePlanner."""
        name, target = write_item.index.fqn, write_item.tensor_data
        if name in self._scalars:
            return self._scalars[name]
        assert target is not None
        data = torch.empty(tuple(target.chunk.sizes), dtype=target.properties.dtype)
        self._checkpoint.fill([TensorBox(name, tuple(target.size), tuple(target.chunk.offsets), data)])
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
    """See Source. It finds tensors by their canonical names. It also accepts names that end in a canonical name and
    identify the moment, as in torch's state dicts: `model.<name>`, `optim.state.<name>.exp_avg`."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises MissingError or DataError."""
        self.where, self._folder = str(folder), folder
        path = folder / DCP_METADATA
        if not path.is_file():
            raise MissingError(f"{path}: there is no such file; name the folder that dcp.save wrote")
        read = read_pickle(read_file_bounded(path, MOST_BYTES), str(path), _NAMES)
        metadata = record_of(read, f"{_METADATA}.Metadata") or {}
        tensors, files = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if not isinstance(tensors, Table) or not isinstance(files, Table):
            raise DataError(f"{path}: is not the metadata of a distributed checkpoint")
        self._tensors: dict[str, _Tensor] = {}
        self._files: dict[tuple[str, tuple[int, ...]], _Part] = {}
        name = ""
        try:
            for name, entry in tensors.by_text().items():
                if (fields := record_of(entry, f"{_METADATA}.TensorStorageMetadata")) is not None:
                    self._tensors[name] = _tensor(fields)
            for index, entry in files.pairs:
                key, fields = record_of(index, f"{_METADATA}.MetadataIndex"), record_of(entry, _STORED)
                if key is not None and fields is not None:
                    name = fqn if isinstance(fqn := key.get("fqn"), str) else ""
                    self._files[name, numbers(key.get("offset") or ())] = _part(fields)
        except ValueError as error:
            raise DataError(f"{path}: {name[:_NAME_CHARACTERS]}: {error}") from None
        self._ending: dict[str, list[str]] = {}
        for name in self._tensors:
            for ending in _endings(name):
                self._ending.setdefault(ending, []).append(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See Source."""
        key = self._key(name)
        return None if key is None else self._tensors[key].shape

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """See Source."""
        key = self._key(name)
        assert key is not None
        tensor = self._tensors[key]
        for offset, size in tensor.chunks:
            if not prod(size):
                continue
            part = self._stored(key, offset)
            if part.shape != size:
                raise DataError(f"{self.where}: {key} holds {list(part.shape)} at {list(offset)}, not {list(size)}")
            for first, data in part.rows(BOX_BYTES):
                yield TensorBox(name, tensor.shape, (offset[0] + first, *offset[1:]) if offset else (), data)

    def _key(self, name: str) -> str | None:
        """The name of a tensor in the checkpoint, or None. Raises DataError if several names fit."""
        if name in self._tensors:
            return name
        moment = next((prefix for prefix in MOMENTS if name.startswith(prefix)), "")
        weight, kind = name.removeprefix(moment), moment.removeprefix("optimizer.").rstrip(".")
        if moment:
            endings = (f"{weight}.{kind}", f"{kind}.{weight}")
            fitting = [key for ending in endings for key in self._ending.get(ending, ())]
        else:
            fitting = [key for key in self._ending.get(weight, ()) if not re.search(r"\bexp_avg", key)]
        if len(fitting) > 1:
            raise DataError(f"{self.where}: {name} may be any of {', '.join(sorted(fitting)[:5])}")
        return fitting[0] if fitting else None

    def _stored(self, key: str, offset: tuple[int, ...]) -> StoredTensor:
        location = self._files.get((key, offset)) or (self._files.get((key, ())) if not any(offset) else None)
        if location is None:
            raise DataError(f"{self.where}: nothing says where {key} at {list(offset)} lies")
        if location.transformed:
            raise DataError(f"{self.where}: {key} is transformed; save it without transforms")
        path = file_inside(self._folder, location.file)
        read = read_tensors(path, location.start, location.length)
        if not isinstance(read, StoredTensor):
            raise DataError(f"{path}: {key} is no tensor")
        return read


@dataclass(frozen=True)
class _Part:
    """The location of a part of a tensor."""

    file: str
    start: int
    length: int
    transformed: bool


@dataclass(frozen=True)
class _Tensor:
    """A tensor, and the offsets and shapes of its parts."""

    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]


def _tensor(fields: Mapping[str, Any]) -> _Tensor:
    """Parse a tensor. Raises ValueError for parts outside the tensor, or with more elements than the tensor."""
    shape = numbers(fields.get("size"))
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    remaining = prod(shape)
    for chunk in chunk_list if isinstance(chunk_list := fields.get("chunks"), list) else ():
        record = record_of(chunk, f"{_METADATA}.ChunkStorageMetadata") or {}
        offset, size = numbers(record.get("offsets")), numbers(record.get("sizes"))
        if not len(offset) == len(size) == len(shape) or any(
            begin + length > extent for begin, length, extent in zip(offset, size, shape, strict=True)
        ):
            raise ValueError(f"a part of {list(size)} at {list(offset)} is not inside of {list(shape)}")
        remaining -= prod(size)
        chunks.append((offset, size))
    if remaining < 0:
        raise ValueError(f"its parts have more elements than {list(shape)}")
    return _Tensor(shape, chunks)


def _part(fields: Mapping[str, Any]) -> _Part:
    file, (start, length) = fields.get("relative_path"), numbers((fields.get("offset"), fields.get("length")))
    if not isinstance(file, str):
        raise ValueError("no file is named for a part")
    return _Part(file, start, length, bool(fields.get("transform_descriptors")))


def _endings(name: str) -> Iterator[str]:
    """A name, and its endings after each of its last dots."""
    if len(name) > _NAME_CHARACTERS:
        return
    parts = name.rsplit(".", _SUFFIX_PARTS)
    for first in range(len(parts)):
        yield ".".join(parts[first:])
