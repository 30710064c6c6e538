"""Low-rank adapters of a served model: each row of a batch computes with its own adapter, or with none.

Adapters are read in the layout of `peft`. A row's product with its adapter is computed alone, so it does not depend on
the adapters of other rows.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.export import FOLDER, PREFIX
from holdfast.model.files import SMALL_BYTES, Files, read_bytes
from holdfast.model.layers import Linear
from holdfast.model.lora import A, B
from holdfast.model.tensor_files import read_header, read_part
from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class LowRank(NamedTuple):
    """The matrices of one layer's adapter."""

    low: Tensor  # [rank, in]
    high: Tensor  # [out, rank]
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
    layers = {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}
    device = decoder.model.embed_tokens.weight.device
    adapter = {}
    for name in places:
        stem = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
        layer = layers.get(stem)
        if layer is None or {PREFIX + stem + A, PREFIX + stem + B} - places.keys():
            raise DataError(f"{files.where}/{prefix}{WEIGHTS}: {name} is no adapter of a linear layer of this model")
        shapes = tuple(places[PREFIX + stem + end].shape for end in (A, B))
        if shapes != ((rank, layer.in_features), (layer.out_features, rank)):
            raise DataError(
                f"{files.where}/{prefix}{WEIGHTS}: {stem} has adapters of {shapes}; rank {rank} and this model need "
                f"{(rank, layer.in_features)} and {(layer.out_features, rank)}"
            )
        if name.endswith(A):
            low, high = (read_part(files, key, places[key]).to(device) for key in (name, PREFIX + stem + B))
            adapter[stem] = LowRank(low, high, scale)
    if not adapter:
        raise DataError(f"{files.where}/{prefix}{WEIGHTS}: has no adapters")
    return adapter


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
    """The adapters of a decoder's rows. Set `rows` before each forward pass: a name, or "" for none."""

    def __init__(self, decoder: Decoder, adapters: Mapping[str, Mapping[str, LowRank]]) -> None:
        self.rows: Sequence[str] = ()
        self._adapters = adapters
        used = {layer for adapter in adapters.values() for layer in adapter}
        for name, module in decoder.named_modules():
            if name in used:
                module.register_forward_hook(partial(self._add, name))

    def _add(self, layer: str, _: nn.Module, inputs: tuple[Tensor, ...], output_BTF: Tensor) -> Tensor:
        (x_BTD,) = inputs
        for row, name in enumerate(self.rows):
            if name and (matrices := self._adapters[name].get(layer)) is not None:
                output_BTF[row] += nn.functional.linear(
                    nn.functional.linear(x_BTD[row], matrices.low), matrices.high
                ) * (matrices.scale)
        return output_BTF
