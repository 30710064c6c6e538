"""Gradient clipping: the norm of the gradients, and scaling to a limit, at each kind of layout.

Each function scales the gradients in place if their norm is above `limit`, and returns the norm before.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.engines.grid import Grid
from holdfast.engines.layout import TensorLayout
from holdfast.engines.torch.elastic import squared_norm

Gradients = Iterable[tuple[TensorLayout, torch.Tensor]]  # see TrainedParameters.gradients


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """For whole replicas, and for shards of one mesh dimension."""
    norm = nn.utils.clip_grad_norm_(list(parameters), float("inf") if limit is None else limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_in_order(gradients: Gradients, limit: float | None, grid: Grid) -> torch.Tensor:
    """For shards, with the same bits at any number of them."""
    shards = [(gradient, layout.part()[0][0], layout.shape[0]) for layout, gradient in gradients]
    norm = squared_norm(shards, grid).sqrt()
    return _scaled([gradient for gradient, _, _ in shards], norm, limit)


def clip_over_mesh(gradients: Gradients, limit: float | None, device: torch.device) -> torch.Tensor:
    """For parts on several mesh dimensions.

    torch would reduce one dimension after another, each tensor separately. This is one sum, and of equal parts one
    counts. With offload, only this sum reaches the device. The device's backend cannot reduce host tensors.
    """
    pairs = list(gradients)
    norms = torch.stack(torch._foreach_norm([gradient for _, gradient in pairs]))
    norms *= torch.tensor([float(layout.copy == 0) for layout, _ in pairs], device=norms.device)
    squared = norms.square().sum().to(device)
    dist.all_reduce(squared)
    return _scaled([gradient for _, gradient in pairs], squared.sqrt(), limit)


def _scaled(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Scale the gradients down in place to the norm `limit` if their norm is above it. Returns the unscaled norm."""
    if limit is not None:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
    return norm
