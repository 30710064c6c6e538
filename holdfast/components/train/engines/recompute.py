"""Activation checkpointing: what a layer's backward pass needs is computed again instead of kept.

The same operations on the same numbers give the same bits, so no model depends on it; it is part of the plan all the
same, because a compiler may see another graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Kept by `selective`: what takes long to compute, against the room that its result takes.
_KEPT: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]


def recompute(layer: nn.Module, kind: Literal["none", "full", "selective"]) -> None:
    """Let a layer keep only its input (`full`), or also the results of its matrix products and of attention
    (`selective`), from the forward to the backward pass. Nothing in a layer draws random numbers."""
    if kind == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    forward: Callable[..., Any] = layer.forward
    layer.forward = partial(checkpoint, forward, **settings)
