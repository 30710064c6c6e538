"""Optimizers of user code (`training.optimizer.build`): their state exists before the first step, by parameter name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.code.load import describe
from holdfast.code.resolve import bind, entered_folder
from holdfast.engines.layout import local
from holdfast.engines.weights import COUNTER
from holdfast.spec.errors import UserCodeError
from holdfast.spec.functions import Function


def own_optimizer(
    function: Function, named: Sequence[tuple[str, nn.Parameter]], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer that a function returns for torch's parameter groups. Its state is created here, by one step with
    zero gradients, learning rate and weight decay. Every tensor of it is 0 and has the shape of its parameter, or is
    the counter `step`. Overwrites the parameters.

    Raises UserCodeError for a function that fails, and for state that a checkpoint could not hold by name.
    """
    use, build = function.use, bind(function)
    try:
        optimizer = build([dict(group) for group in groups])
    except Exception as error:
        raise UserCodeError(f"{use}: failed: {describe(error, Path(entered_folder()))}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"{use}: returned {type(optimizer).__name__}; return a torch.optim.Optimizer")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(held) != len(named) or {id(parameter) for parameter in held} != {id(parameter) for _, parameter in named}:
        raise UserCodeError(f"{use}: its optimizer has other parameters than the groups; give it all groups")
    if lacking := sorted({name for group in groups for name in group if name not in optimizer.param_groups[0]}):
        raise UserCodeError(f"{use}: its groups lack {', '.join(lacking)}; pass the groups on as they are")
    _create_state(use, optimizer)
    for name, parameter in named:
        for key, value in optimizer.state[parameter].items():
            _check(f"{use}: state {key!r} of {name}", key, value, parameter)
    return optimizer


@torch.no_grad()
def _create_state(use: str, optimizer: torch.optim.Optimizer) -> None:
    """Make one step with zero gradients, learning rate and weight decay, on parameters of ones. Counters are set back
    to 0. Raises UserCodeError if it changes values of the groups, which no checkpoint holds."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    before = [_settings(group) for group in optimizer.param_groups]
    try:
        optimizer.step()
    except Exception as error:
        raise UserCodeError(f"{use}: its step failed: {describe(error, Path(entered_folder()))}") from error
    for old, group in zip(before, optimizer.param_groups, strict=True):
        changed = sorted(name for name, value in _settings(group).items() if old.get(name) != value)
        if changed:
            raise UserCodeError(
                f"{use}: a step changes {changed[0]!r} of its groups, which is not saved; keep it in the state of each "
                f"parameter, as the tensor {COUNTER!r} or a tensor like the parameter"
            )
    optimizer.zero_grad(set_to_none=True)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    for state in optimizer.state.values():
        if isinstance(counter := state.get(COUNTER), Tensor):
            counter.zero_()


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _check(label: str, key: object, value: object, parameter: nn.Parameter) -> None:
    """Raises UserCodeError for state that is not saved by the name of its parameter."""
    if not isinstance(key, str) or not key.isidentifier():
        raise UserCodeError(f"{label}: has no name; use an identifier")
    if not isinstance(value, Tensor):
        raise UserCodeError(f"{label}: is {type(value).__name__}, which is not saved; keep it as a tensor")
    if key == COUNTER and value.dim() == 0:
        return
    if value.shape != parameter.shape or type(value) is not type(parameter.data):
        raise UserCodeError(
            f"{label}: has the shape {list(value.shape)}, and its parameter {list(parameter.shape)}, so no layout can "
            "divide it; use torch.zeros_like(parameter)"
        )
    if value.dtype != parameter.dtype:
        raise UserCodeError(f"{label}: is {value.dtype}, and its parameter {parameter.dtype}; use zeros_like")
    if bool((local(value) != 0).any()):
        raise UserCodeError(
            f"{label}: is not 0 after a step with zero gradients, so it depends on the weights or on a constant; begin "
            "it at 0"
        )
