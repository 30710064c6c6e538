"""DeepSpeed's universal checkpoints, as `ds_to_universal.py` writes them, as a source.

One folder a parameter, `zero/<name>/`, with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`. They are read by
`torch.load(weights_only=True)` and mapped into memory, so no more of a tensor is held than the rows at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from holdfast.components.checkpoint import TensorBox
from holdfast.components.exchange.take_in import MOMENTS, WRITER_BYTES
from holdfast.components.spec.errors import DataError, MissingError

_FILES = {"": "fp32.pt", MOMENTS[0]: "exp_avg.pt", MOMENTS[1]: "exp_avg_sq.pt"}


class UniversalCheckpoint:
    """See Source. Parameters are known by their canonical names, with or without `module.` in front."""

    def __init__(self, folder: Path) -> None:
        """The folder of one step, or one with a `latest_universal` that names it. Raises MissingError."""
        latest = folder / "latest_universal"
        if latest.is_file() and not (folder / "zero").is_dir():
            named = latest.read_text(encoding="utf-8").strip()
            if Path(named).name != named:
                raise DataError(f"{latest}: names {named!r}, which is no folder beside it")
            folder = folder / named
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
        shape = tuple(tensor.shape)
        rows = max(1, WRITER_BYTES // 4 // max(1, 4 * prod(shape[1:])))
        for first in range(0, shape[0], rows):
            yield TensorBox(name, shape, (first, *(0 for _ in shape[1:])), tensor[first : first + rows])

    def _tensor(self, name: str) -> torch.Tensor | None:
        """A tensor, mapped into memory."""
        moment = next((prefix for prefix in MOMENTS if name.startswith(prefix)), "")
        weight = name.removeprefix(moment)
        for folder in (weight, f"module.{weight}"):
            path = self._zero / folder / _FILES[moment]
            if path.is_file():
                break
        else:
            return None
        try:
            read = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # noqa: BLE001 - torch.load raises what it likes for a torn file
            raise DataError(f"{path}: cannot be read: {error}") from None
        tensor = read.get("param") if isinstance(read, dict) else read
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise DataError(f"{path}: holds no tensor of numbers")
        return tensor.detach()
