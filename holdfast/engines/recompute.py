"""Activation checkpointing: a layer's backward pass recomputes its inputs instead of keeping them.

The same operations on the same numbers give the same bits, so no model depends on it. It is still part of the plan,
because a compiler may see another graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holdfast.model.attention import packed  # noqa: F401 - registers an operator

# Kept by `selective`: results that take long to compute relative to their size.
_KEPT: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.holdfast.packed_attention.default,
    flex_attention_hop,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]


def recompute(layer: nn.Module, kind: Literal["none", "full", "selective"]) -> None:
    """Set what a layer keeps for the backward pass: only its input (`full`), or also the results of matrix products
    and attention (`selective`). Layers draw no random numbers."""
    if kind == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    forward: Callable[..., Any] = layer.forward

    def recomputed(*inputs: Any) -> Any:
        """A frame of this package: torch compiles nothing that begins in `checkpoint` itself."""
        return checkpoint(forward, *inputs, **settings)

    layer.forward = recomputed
