"""The optimizers, their state there from the start, and updates that a tensor on the device may hold back: AdamW as
torch has it, and LAMB."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.components.train.engines.layout import local
from holdfast.components.train.engines.torch.lamb import Lamb, Rows
from holdfast.components.train.weights import MOMENTS
from holdfast.spec.training import Optimizer


def optimizer_of(
    decoder: nn.Module, settings: Optimizer, *, anywhere: bool, rows: Mapping[nn.Parameter, Rows] | None
) -> torch.optim.Optimizer:
    """What the settings name, with decay on matrices only, and its state there from the start so that a checkpoint
    always has every name. `anywhere`: an element gets the same bits wherever a shard ends. torch's fused kernel for
    CPUs rounds the last elements of a tensor, which do not fill a vector, otherwise than the rest. `rows`: see Lamb."""
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
    """Parameter groups of what is trained: matrices decay, norms do not. Each is of what lies on one mesh."""
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
    """One step of the optimizer, which leaves everything as it is, and counts none, where `held` is 1.0. No host waits
    for that number: the fused kernel takes it, as it does from torch's own gradient scaler. Where the kernel is another
    one, what was there before is put back."""
    fused = optimizer.defaults["fused"]
    if held is not None:
        held = held.to(next(iter(optimizer.state)).device)  # a host that steps itself has to know
    if held is None or fused:
        optimizer.found_inf = held  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()
        return
    touched = [local(tensor) for each, state in optimizer.state.items() for tensor in (each, *state.values())]
    before = [tensor.clone() for tensor in touched]
    optimizer.step()
    for tensor, old in zip(touched, before, strict=True):
        tensor.copy_(torch.where(held.bool(), old, tensor))
