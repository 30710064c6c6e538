"""Optimizers: torch's AdamW, and LAMB. Their state exists from the start, and a tensor on the device can hold an
update back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.engines.layout import local
from holdfast.engines.torch.lamb import Lamb, Rows
from holdfast.engines.weights import MOMENTS
from holdfast.spec.training import Optimizer


def optimizer_of(
    decoder: nn.Module, settings: Optimizer, *, anywhere: bool, rows: Mapping[nn.Parameter, Rows] | None
) -> torch.optim.Optimizer:
    """The configured optimizer, with decay on matrices only. Its state exists from the start, so a checkpoint always
    has every name. With `anywhere`, an element gets the same bits wherever a shard ends. torch's fused CPU kernel does
    not ensure that. It rounds the last elements of a tensor, which do not fill a vector, differently. For `rows` see
    Lamb."""
    groups = decay_groups(decoder, settings.weight_decay)
    optimizer: torch.optim.Optimizer
    if settings.kind == "lamb":
        optimizer = Lamb(groups, settings, rows)
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=not anywhere,
            foreach=anywhere,
        )
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | {
            key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS
        }
    return optimizer


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of the trained parameters: matrices decay, norms do not. Each group lies on one mesh."""
    groups: dict[tuple[Any, bool], list[nn.Parameter]] = {}
    for parameter in filter(lambda each: each.requires_grad, module.parameters()):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, parameter.dim() >= 2), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if matrix else 0.0}
        for (_, matrix), parameters in groups.items()
    ]


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, held: Tensor | None) -> None:
    """Run one optimizer step. If `held` is 1.0, it changes nothing and counts no step. No host waits for `held`: the
    fused kernel takes it, as from torch's gradient scaler. For other kernels the old values are restored."""
    fused = optimizer.defaults["fused"]
    if held is not None:
        held = held.to(next(iter(optimizer.state)).device)  # with offload the host runs the step and needs the value
    if held is None or fused:
        optimizer.found_inf = held  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
        return
    touched = [local(tensor) for parameter, state in optimizer.state.items() for tensor in (parameter, *state.values())]
    before = [tensor.clone() for tensor in touched]
    optimizer.step()
    for tensor, old in zip(touched, before, strict=True):
        tensor.copy_(torch.where(held.bool(), old, tensor))
