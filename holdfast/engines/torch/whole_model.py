"""A copy of the model with whole weights on every rank, from the parts of all ranks in any layout."""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.layout import TensorLayout, share_out
from holdfast.engines.torch.balance import Balance
from holdfast.model.decoder import Decoder
from holdfast.model.lora import add_adapters


def whole_model(
    spec: Assignment, vocabulary: int, weights: Iterable[tuple[TensorLayout, TensorBox]], device: torch.device
) -> Decoder:
    """The model on `device`. `weights` are the layout and this rank's box of each weight, and of the routers' biases.
    A collective call of all ranks."""
    with torch.device("meta"):
        whole = Decoder(spec.model, vocabulary)
        add_adapters(whole, spec.training.lora)
    whole.to_empty(device=device)
    whole.reset_buffers()
    own: dict[str, list[TensorBox]] = {}
    for box in share_out(weights):
        own.setdefault(box.name, []).append(box)
    for name, tensor in chain(whole.named_parameters(), Balance([whole], spec.model.routing).state()):
        _fill(tensor.detach(), own.get(name, ()))
    return whole


def _fill(whole: Tensor, own: Sequence[TensorBox]) -> None:
    """Fill a tensor from the boxes of all ranks. One rank gives an element, and all others add bytes of 0 to it, so
    every bit stays, also that of a negative zero."""
    whole.zero_()
    for box in own:
        part = tuple(slice(first, first + size) for first, size in zip(box.offset, box.data.shape, strict=True))
        whole[part] = box.data.to(whole.device)
    if dist.is_initialized():
        dist.all_reduce(whole.view(-1).view(torch.uint8))
