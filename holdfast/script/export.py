"""Export of a script: a folder of files in the store, with a record of their digests.

A module becomes one safetensors file with whole tensors by name. The same state gives the same bytes, whichever rank
writes them. Pickled files are refused, because loading one runs its code.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import Manifest
from holdfast.checkpoint.box import as_bytes
from holdfast.collectives import Gang
from holdfast.model.verified import BLOCK_BYTES, Digester, ExportRecord, FileRecord
from holdfast.script.items import named_tensors
from holdfast.script.tree import StateError
from holdfast.store import Store, layout

MODULE_FILE = "model.safetensors"
_PICKLES = (".pkl", ".pickle", ".joblib")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_export(
    what: nn.Module | str | Path | Callable[[Path], object],
    folder: Path,
    store: Store,
    manifest: Callable[[], Manifest],
    gang: Gang,
) -> None:
    """Export `what` as the result of the checkpoint of `manifest`, which is read on rank 0. A function writes into
    `folder` on every rank, and rank 0's files count. Collective. Raises StateError."""
    folder.mkdir(exist_ok=True)
    if isinstance(what, nn.Module):
        _write_module(what, folder / MODULE_FILE, gang)
    elif callable(what):
        what(folder)
    else:
        folder = Path(what)
    gang.barrier()
    gang.from_rank_0(lambda: _upload(folder, store, manifest()))


def _write_module(module: nn.Module, path: Path, gang: Gang) -> None:
    """Write the tensors of a module, one after another. All ranks gather, and rank 0 writes."""
    tensors = {name.removeprefix("model/"): tensor for name, tensor in named_tensors(module, "model")[0].items()}
    header: dict[str, object] = {}
    end = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in _NAMES:
            raise StateError(f"{name}: safetensors has no {tensor.dtype}; export a function that writes the files")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = path.open("wb") if gang.rank == 0 else None
    try:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(tensors.items()):
            whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if file is not None and whole.numel():
                file.write(as_bytes(whole.detach().cpu()))
    finally:
        if file is not None:
            file.close()


def _upload(folder: Path, store: Store, manifest: Manifest) -> None:
    """Write the files of a folder and their record. Raises StateError for what is no export."""
    if not folder.is_dir():
        raise StateError(f"session.export: {folder} is no folder; give a module, a folder or a function of a folder")
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if not paths:
        raise StateError(f"session.export: {folder} is empty; write the files of the model into it")
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise StateError(f"session.export: {path} is no plain file; copy its content")
        if _is_pickled(path):
            raise StateError(f"session.export: {path.name} is pickled, and loading it runs its code; write safetensors")
    target = layout.export(manifest.run_id, manifest.step, manifest.state_digest)
    files: dict[str, FileRecord] = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        digesters: list[Digester] = []
        store.put_stream(target + name, path.stat().st_size, partial(_content, path, digesters))
        info = store.stat(target + name)
        files[name] = digesters[-1].record("" if info is None else info.version)
    record = ExportRecord(state_digest=manifest.state_digest, files=files, whole=True)
    store.put(layout.export_record(target), record.model_dump_json(indent=1).encode())


def _content(path: Path, digesters: list[Digester]) -> Iterator[bytes]:
    """The bytes of a file. The last of `digesters` belongs to the upload that succeeds."""
    digester = Digester()
    digesters.append(digester)
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            digester.update(data)
            yield data


def _is_pickled(path: Path) -> bool:
    """Whether a file is a pickle, or an archive of torch that contains one."""
    with path.open("rb") as file:
        start = file.read(4)
    if path.suffix in _PICKLES or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        return True
    if start != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".pkl") for name in archive.namelist())
