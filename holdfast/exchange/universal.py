"""DeepSpeed's universal checkpoints, as `ds_to_universal.py` writes them, as a source.

Each parameter has a folder `zero/<name>/` with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`. They are read without
torch's loader (`torch_file`). So nothing is unpickled, and only the current rows of a tensor are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint import TensorBox
from holdfast.exchange.import_checkpoint import BOX_BYTES, MOMENTS
from holdfast.exchange.torch_file import StoredTensor, file_inside, read_tensors
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import read_file_bounded

_FILES = {"": "fp32.pt", MOMENTS[0]: "exp_avg.pt", MOMENTS[1]: "exp_avg_sq.pt"}


class UniversalCheckpoint:
    """See Source. It finds parameters by their canonical names, with or without the prefix `module.`."""

    def __init__(self, folder: Path) -> None:
        """Open the folder of one step, or a folder whose `latest_universal` names it. Raises MissingError."""
        latest = folder / "latest_universal"
        if latest.is_file() and not (folder / "zero").is_dir():
            named = read_file_bounded(latest, 4096).decode("utf-8", "replace").strip()
            folder = file_inside(folder, named)
        if not (folder / "zero").is_dir():
            raise MissingError(
                f"{folder}: has no folder `zero`; convert a DeepSpeed checkpoint first: "
                "python -m deepspeed.checkpoint.ds_to_universal --input_folder … --output_folder …"
            )
        self.where, self._zero = str(folder), folder / "zero"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See Source."""
        tensor = self._tensor(name)
        return None if tensor is None else tuple(tensor.shape)

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """See Source."""
        tensor = self._tensor(name)
        assert tensor is not None
        for first, data in tensor.rows(BOX_BYTES):
            yield TensorBox(name, tensor.shape, (first, *(0 for _ in tensor.shape[1:])) if tensor.shape else (), data)

    def _tensor(self, name: str) -> StoredTensor | None:
        """A tensor in its file, or None."""
        moment = next((prefix for prefix in MOMENTS if name.startswith(prefix)), "")
        weight = name.removeprefix(moment)
        for parameter in (weight, f"module.{weight}"):
            folder = self._zero / parameter
            if (folder / _FILES[moment]).is_file():
                break
        else:
            return None
        path = file_inside(file_inside(self._zero, parameter), _FILES[moment])
        read = read_tensors(path)
        tensor = read.get("param") if isinstance(read, dict) else read
        if tensor is None:
            raise DataError(f"{path}: holds no tensor of numbers")
        return tensor
