"""Placement of a decoder on several accelerators of one process, for models that do not fit one.

Each accelerator has a run of consecutive layers. The results are those of one accelerator of that kind. Only one of
them computes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.spec.model import Model


def empty_on(devices: Sequence[torch.device], shape: Model, vocabulary: int, end_of_text: int | None = None) -> Decoder:
    """A decoder with unfilled weights. Embedding and head are on the first device."""
    if len(devices) == 1:
        return Decoder.empty(shape, vocabulary, devices[0], end_of_text)
    decoder = Decoder.empty(shape, vocabulary, "meta", end_of_text)
    layers = len(decoder.model.layers)
    for index, layer in enumerate(decoder.model.layers):
        place = devices[index * len(devices) // layers]
        layer.to_empty(device=place)
        _bring_inputs(layer, place)
    for module in (decoder.model.embed_tokens, decoder.model.norm, decoder.lm_head):
        if module is not None:
            module.to_empty(device=devices[0])
    _bring_inputs(decoder.model.norm, devices[0])
    decoder.cos_TK = torch.empty_like(decoder.cos_TK, device=devices[0])
    decoder.sin_TK = torch.empty_like(decoder.sin_TK, device=devices[0])
    decoder.reset_buffers()
    return decoder


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    def bring(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.to(device) if isinstance(each, Tensor) else each for each in inputs)

    module.register_forward_pre_hook(bring)
