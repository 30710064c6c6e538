"""Optimizers: torch's AdamW, LAMB, Muon, and those of user code. Their state exists from the start, and a tensor on the
device can hold an update back."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.engines.groups import group_of
from holdfast.engines.layout import local
from holdfast.engines.torch.lamb import Lamb, Rows
from holdfast.engines.torch.muon import BY_MUON, Muon
from holdfast.engines.torch.own_optimizer import own_optimizer
from holdfast.engines.weights import MOMENTS
from holdfast.spec.training import Optimizer

RATE_FACTOR = "rate_factor"  # key of a parameter group
LAYERS, EXPERTS = ".layers.", ".experts."  # in the canonical names of their parameters


def optimizer_of(
    parameters: Iterable[tuple[str, nn.Parameter]],
    settings: Optimizer,
    *,
    anywhere: bool,
    rows: Mapping[nn.Parameter, Rows] | None,
    experts: int = 1,
) -> torch.optim.Optimizer:
    """The configured optimizer of `parameters`, by canonical name. Its state exists from the start, so a checkpoint
    always has every name. With `anywhere`, an element gets the same bits wherever a shard ends. torch's fused CPU
    kernel does not ensure that. It rounds the last elements of a tensor, which do not fill a vector, differently. For
    `rows` see Lamb. Each of a layer's `experts` is a matrix for Muon."""
    named = list(parameters)
    if settings.build is not None:
        return own_optimizer(settings.build, named, parameter_groups(named, settings))
    groups = parameter_groups(named, settings)
    optimizer: torch.optim.Optimizer
    if settings.kind == "lamb":
        optimizer = Lamb(groups, settings, rows)
    elif settings.kind == "muon":
        blocks = {parameter: experts if EXPERTS in name else 1 for name, parameter in named}
        adamw = partial(
            torch.optim.AdamW, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=False, foreach=True
        )
        optimizer = Muon(groups, settings, blocks, rest=adamw)
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=not anywhere,
            foreach=anywhere,
        )
    pairs = [(parameter, group[BY_MUON]) for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, by_muon in pairs:
        keys = ("momentum_buffer",) if by_muon else MOMENTS
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | {
            key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in keys
        }
    return optimizer


def parameter_groups(parameters: Iterable[tuple[str, nn.Parameter]], settings: Optimizer) -> list[dict[str, Any]]:
    """torch's parameter groups. Matrices decay, and norms do not, unless the spec's groups say so. Each group lies on
    one mesh, and has the `rate_factor` of its learning rate. Muon updates the matrices of layers."""
    groups: dict[tuple[Any, float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        own = group_of(name, settings.groups)
        decay = own.weight_decay
        if decay is None:
            decay = settings.weight_decay if parameter.dim() >= 2 else 0.0
        by_muon = settings.kind == "muon" and parameter.dim() == 2 and LAYERS in name and not own.adamw
        groups.setdefault((mesh, decay, own.rate_factor, by_muon), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, RATE_FACTOR: factor, BY_MUON: by_muon}
        for (_, decay, factor, by_muon), members in groups.items()
    ]


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[RATE_FACTOR]


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, held: Tensor | None) -> None:
    """Run one optimizer step. If `held` is 1.0, it changes nothing and counts no step. No host waits for `held`: the
    fused kernel takes it, as from torch's gradient scaler. For other kernels the old values are restored."""
    fused = optimizer.defaults.get("fused")
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
