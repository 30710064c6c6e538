"""Low-rank adapters of a served model: each row of a batch computes with its own adapter, or with none.

Adapters are read in the layout of `peft`. A row's product with its adapter is computed alone, so it does not depend on
the adapters of other rows. The experts of a mixture compute each row alone, with and without adapters: the bits of a
product depend on its height, which is the number of tokens that chose an expert.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.experts import Experts, Matrices, Matrix
from holdfast.model.export import FOLDER, PREFIX
from holdfast.model.files import SMALL_BYTES, Files, read_bytes
from holdfast.model.layers import Linear
from holdfast.model.lora import A, B
from holdfast.model.tensor_files import read_header, read_part
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INNER = ".base_layer"  # in the name of the first of two adapted parameters of one module
ALIGNED = 8  # bf16 numbers in the 16 bytes that a grouped product needs


class LowRank(NamedTuple):
    """The matrices of one layer's adapter. Those of a layer's experts are stacked."""

    low: Tensor  # [rank, in]; of experts [experts * rank, in]
    high: Tensor  # [out, rank]; of experts [experts * out, rank]
    scale: float


def adapter_folder(files: Files) -> str:
    """The prefix of the adapter's files: none, or that of an export. Raises MissingError."""
    for prefix in ("", f"{FOLDER}/"):
        if files.size(prefix + CONFIG) is not None:
            return prefix
    raise MissingError(f"{files.where}: has no {CONFIG}; name a folder or an export with a LoRA adapter")


def read_adapter(files: Files, decoder: Decoder) -> dict[str, LowRank]:
    """The adapter in `files` for a decoder, by the names of its layers. Raises DataError if it does not fit."""
    prefix = adapter_folder(files)
    where = f"{files.where}/{prefix}{CONFIG}"
    config = parse_json_object(read_bytes(files, prefix + CONFIG, SMALL_BYTES) or b"", where, finite=False)
    _require_plain(config, where)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise DataError(f"{where}: r = {rank} and lora_alpha = {alpha} are no rank and no factor")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    places = read_header(files, prefix + WEIGHTS)
    layers = {name: module for name, module in decoder.named_modules() if isinstance(module, Linear | Experts)}
    device = decoder.model.embed_tokens.weight.device
    adapter = {}
    for name in places:
        stem = name.removesuffix(A).removesuffix(B)
        layer = layers.get(stem.removeprefix(PREFIX).removesuffix(INNER))
        if layer is None or {stem + A, stem + B} - places.keys():
            raise DataError(
                f"{files.where}/{prefix}{WEIGHTS}: {name} is no adapter of a linear layer or of stacked experts of "
                "this model; merge the adapter into its model, and serve that"
            )
        if name.endswith(B):
            continue
        shapes = (tuple(places[stem + A].shape), tuple(places[stem + B].shape))
        fitting = _shapes_of(layer, rank)
        if shapes not in fitting.values():
            needed = " or ".join(f"{low} and {high}" for low, high in fitting.values())
            raise DataError(
                f"{files.where}/{prefix}{WEIGHTS}: {stem} has adapters of {shapes[0]} and {shapes[1]}; rank {rank} and "
                f"this model need {needed}"
            )
        low, high = (read_part(files, stem + end, places[stem + end]).to(device) for end in (A, B))
        canonical = stem.removeprefix(PREFIX)
        if isinstance(layer, Experts):
            matrix = next(matrix for matrix, each in fitting.items() if each == shapes)
            canonical = f"{canonical.removesuffix(INNER)}.{matrix}"
            low, high = _stacked(low, high, layer.experts)
        adapter[canonical] = LowRank(low, high, scale)
    if not adapter:
        raise DataError(f"{files.where}/{prefix}{WEIGHTS}: has no adapters")
    return adapter


def _shapes_of(layer: Linear | Experts, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes that a file can have for the adapter of each matrix of a layer."""
    if isinstance(layer, Linear):
        return {"": ((rank, layer.in_features), (layer.out_features, rank))}
    count = layer.experts
    shapes = {"gate_up": layer.gate_up_proj.shape, "down": layer.down_proj.shape}
    return {name: ((count * rank, columns), (rows // count, count * rank)) for name, (rows, columns) in shapes.items()}


def _stacked(low: Tensor, high: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The adapters of experts as `StackedAdapter` has them, from the order of `peft_files`. Ranks are filled up with
    zeros to what a grouped product needs."""
    low, high = low.unflatten(0, (experts, -1)), high.unflatten(1, (-1, experts)).permute(2, 0, 1)
    missing = -low.shape[1] % ALIGNED
    low, high = nn.functional.pad(low, (0, 0, 0, missing)), nn.functional.pad(high, (0, missing))
    return low.flatten(0, 1).contiguous(), high.flatten(0, 1).contiguous()


def _require_plain(config: Mapping[str, Any], where: str) -> None:
    """Refuse kinds of adapters that this code does not compute."""
    plain = {"peft_type": ("LORA",), "bias": ("none", None)}
    for name, allowed in plain.items():
        if config.get(name) not in allowed:
            raise DataError(f"{where}: {name} = {config.get(name)!r} cannot be served; only {allowed[0]!r} can")
    for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if config.get(name):
            raise DataError(f"{where}: {name} cannot be served; merge the adapter into its model")


class AdapterRows:
    """The adapters of a decoder's rows. Set `rows` before each forward pass: a name, "" for none, or None where
    nothing is answered."""

    def __init__(self, decoder: Decoder, adapters: Mapping[str, Mapping[str, LowRank]]) -> None:
        self.rows: Sequence[str | None] = ()
        self._adapters = adapters
        used = {layer for adapter in adapters.values() for layer in adapter}
        for name, module in decoder.named_modules():
            if isinstance(module, Experts):
                module.forward = partial(self._by_row, name, module)  # type: ignore[method-assign]
            elif name in used:
                module.register_forward_hook(partial(self._add, name))

    def _add(self, layer: str, _: nn.Module, inputs: tuple[Tensor, ...], output_BTF: Tensor) -> Tensor:
        (x_BTD,) = inputs
        for row, name in enumerate(self.rows):
            if name and (matrices := self._adapters[name].get(layer)) is not None:
                output_BTF[row] += nn.functional.linear(
                    nn.functional.linear(x_BTD[row], matrices.low), matrices.high
                ) * (matrices.scale)
        return output_BTF

    def _by_row(self, layer: str, experts: Experts, x_ND: Tensor, chosen_NC: Tensor, weight_NC: Tensor) -> Tensor:
        """The experts of each row, one row after another, and zeros where nothing is answered."""
        parts = (each.unflatten(0, (len(self.rows), -1)) for each in (x_ND, chosen_NC, weight_NC))
        return torch.cat(
            [
                torch.zeros_like(x)
                if name is None
                else Experts.forward(experts, x, chosen, weight, self._matrices(layer, experts, name))
                for name, x, chosen, weight in zip(self.rows, *parts, strict=True)
            ]
        )

    def _matrices(self, layer: str, experts: Experts, name: str) -> Matrices:
        base = experts.matrices()
        return Matrices(
            self._adapted(f"{layer}.gate_up", base.gate_up, name),
            self._adapted(f"{layer}.down", base.down, name),
            base.clamped,
        )

    def _adapted(self, stem: str, matrix: Matrix, name: str) -> Matrix:
        adapter = self._adapters[name].get(stem) if name else None
        if adapter is None:
            return matrix
        return matrix._replace(adapter=(adapter.low, adapter.high), scale=adapter.scale)
