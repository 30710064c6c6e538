"""Fewer and faster operations of a decoder that reads few rows on the CPU.

A product of few rows is faster by a transposed copy of the matrix, and matrices with the same input are one copy. The
results are equal up to rounding. Copies exist only during generation. Shape suffixes: as in `decoder`; I, O inputs and
outputs of a matrix.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.layers import Attention, FeedForward, Linear
from holdfast.model.rotary import rotate

Product = Callable[[Tensor], Tensor]


@contextmanager
def fused(decoder: Decoder) -> Iterator[None]:
    """Let the modules of a decoder on the CPU compute by copies. Does nothing on another device and under autocast.
    Layers that are not plain, such as those with adapters, compute as they are."""
    if decoder.model.embed_tokens.weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        yield
        return
    changed: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, function: Callable[..., object]) -> None:
        vars(module)[name] = function
        changed.append((module, name))

    try:
        done: set[nn.Module] = set()
        for module in decoder.modules():
            if type(module) is Attention and module.q_norm is None and _are_plain(
                parts := [module.q_proj, module.k_proj, module.v_proj]
            ):  # fmt: skip
                replace(module, "project", partial(_project, module, product_of(*parts)))
                done.update(parts)
            elif type(module) is FeedForward and _are_plain(parts := [module.gate_proj, module.up_proj]):
                replace(module, "forward", partial(_feed_forward, module, product_of(*parts)))
                done.update(parts)
            elif type(module) is nn.RMSNorm:
                replace(module, "forward", partial(_norm, module))
            elif type(module) is Linear and module not in done:
                replace(module, "forward", product_of(module))
        if decoder.lm_head is None:
            replace(decoder, "head", partial(_multiply, decoder.head_weight.t().contiguous(), None))
        yield
    finally:
        for module, name in changed:
            del vars(module)[name]


def product_of(*layers: Linear) -> Product:
    """The product of an input with the matrices of all these layers, one after another."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return partial(
        _multiply,
        torch.cat([layer.weight.t() for layer in layers], 1).contiguous(),
        torch.cat(biases) if biases else None,
    )


def _are_plain(layers: list[Linear]) -> bool:
    return {(type(layer), layer.bias is None) for layer in layers} <= {(Linear, layers[0].bias is None)}


def _multiply(weight_IO: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    x_NI = x.reshape(-1, x.shape[-1])
    y_NO = torch.mm(x_NI, weight_IO) if bias_O is None else torch.addmm(bias_O, x_NI, weight_IO)
    return y_NO.view(*x.shape[:-1], -1)


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    assert norm.eps is not None
    return (x * x.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()).mul_(norm.weight)


def _project(
    attention: Attention, product: Product, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Attention.project`. Queries and keys are rotated together."""
    width = attention.head_width
    heads, groups = attention.q_proj.out_features // width, attention.k_proj.out_features // width
    x_BHTK = product(x_BTD).view(*x_BTD.shape[:2], -1, width).transpose(1, 2)
    rotated_BHTK, v_BGTK = x_BHTK.split((heads + groups, groups), 1)
    if attention.rotates:
        rotated_BHTK = rotate(rotated_BHTK, cos_TK, sin_TK)
    q_BHTK, k_BGTK = rotated_BHTK.split((heads, groups), 1)
    return q_BHTK, k_BGTK, v_BGTK


def _feed_forward(layer: FeedForward, product: Product, x_BTD: Tensor) -> Tensor:
    """See `FeedForward`."""
    gate_BTF, up_BTF = product(x_BTD).chunk(2, -1)
    return layer.down_proj(layer.activate(gate_BTF) * up_BTF)
