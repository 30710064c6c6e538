"""One object of a script as boxes of a checkpoint, by name, and back.

Modules are carried by the names of their parameters and buffers. The state of an optimizer is carried by the names of
its parameters. It is created from the catalogue of the checkpoint, without an optimizer step. Other objects are
carried as what `state_dict` returns: plain values as JSON in a tensor of bytes, and their tensors apart. What cannot be
carried raises StateError with its path.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import TensorBox
from holdfast.checkpoint.box import DTYPES
from holdfast.checkpoint.catalogue import TensorInfo
from holdfast.engines.layout import TensorLayout, like
from holdfast.script import tree
from holdfast.script.tree import StateError

_SHOWN = 5  # names in a message
# Dtypes that the format does not have are stored as the bits of one with equal size.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
# Wrappers whose attribute is no part of a name, by the name of their class.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_REFUSED = {
    "FullyShardedDataParallel": "its flat parameters have no names; use torch.distributed.fsdp.fully_shard",
    "DeepSpeedEngine": "its state is no plain tensors; use a Holdfast spec with parallel.strategy: zero1 to zero3",
}


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state, such as a schedule, a loader or an object of the user."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""

    def load_state_dict(self, state: Any, /) -> object:
        """Take a state that `state_dict` returned."""


@dataclass(frozen=True)
class Live:
    """The state of an item at this moment."""

    plain: Any  # its JSON
    tensors: Mapping[str, Tensor]  # by their full names
    steady: frozenset[str] = frozenset()  # names of tensors that change only in an optimizer step


@dataclass(frozen=True)
class Target:
    """A tensor to fill from a checkpoint. `finish` makes the tensor of the item from the filled local part, which is
    not yet memory of the item: a checkpoint that does not verify must leave the item as it is."""

    layout: TensorLayout
    data: Tensor  # local, with a dtype of the format
    finish: Callable[[Tensor], Tensor] = lambda local: local

    @property
    def box(self) -> TensorBox:
        """The box to fill."""
        return self.layout.box(self.data)


class Item(Protocol):
    """One named object of `session.restore`."""

    def live(self) -> Live:
        """Its state now. Raises StateError for what cannot be carried."""

    def targets(self, infos: Mapping[str, TensorInfo]) -> dict[str, Target]:
        """The tensors to fill, for the tensors of a checkpoint that belong to it. Raises StateError."""

    def adopt(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take the state of a checkpoint, whose tensors are filled."""


def stored(tensor: Tensor) -> Tensor:
    """A view of a local tensor with a dtype of the format."""
    if tensor.dtype in DTYPES.values():
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def original(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor of which `stored` made a view, from the name of its dtype."""
    wanted: torch.dtype = getattr(torch, dtype)
    return torch.view_as_complex(tensor) if wanted.is_complex else tensor.view(wanted)


def _target(name: str, tensor: Tensor) -> Target:
    """A target whose content replaces that of a live tensor."""
    data = torch.empty_like(stored(local_part(tensor)))
    return Target(layout_of(name, tensor), data, lambda local: _replace(tensor, local))


def _replace(tensor: Tensor, local: Tensor) -> Tensor:
    with torch.no_grad():
        local_part(tensor).copy_(local)
    return tensor


def layout_of(name: str, tensor: Tensor) -> TensorLayout:
    if tensor.is_complex():
        if isinstance(tensor, DTensor):
            raise StateError(f"{name} is a DTensor of complex numbers; keep its real and imaginary part apart")
        return TensorLayout(name, (*tensor.shape, 2))
    try:
        return TensorLayout.of(name, tensor)
    except ValueError as error:
        raise StateError(f"{error}; sum it first, for instance by full_tensor()") from None


def local_part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def named_tensors(module: nn.Module, item: str) -> tuple[dict[str, Tensor], dict[str, str], dict[str, nn.Module]]:
    """The parameters and persistent buffers of a module by full name, the names of tied ones with the name that has
    the tensor, and the modules with state beyond tensors."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    extra: dict[str, nn.Module] = {}
    names: dict[int, str] = {}
    for path, part in _modules(module, item):
        if (remedy := _REFUSED.get(type(part).__name__)) is not None:
            raise StateError(f"{path} is a {type(part).__name__}: {remedy}")
        transient = part._non_persistent_buffers_set
        held = {**part._parameters, **{name: one for name, one in part._buffers.items() if name not in transient}}
        for name, tensor in held.items():
            if tensor is None:
                continue
            full = f"{path}.{name}" if path != item else f"{item}/{name}"
            if tensor.is_meta:
                raise StateError(f"{full} is on the meta device; give the module its memory (to_empty) before restore")
            first = names.setdefault(id(tensor), full)
            if first == full:
                tensors[full] = tensor
            else:
                tied[full] = first
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            extra[path] = part
    return tensors, tied, extra


def _modules(module: nn.Module, path: str, depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """A module and those below it with their names, without the parts of wrappers."""
    wrapper = type(module).__name__
    if wrapper in _WRAPPERS and isinstance(inner := getattr(module, _WRAPPERS[wrapper], None), nn.Module):
        yield from _modules(inner, path, depth)
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if depth else f"{path}/{name}", depth + 1)


@dataclass
class ModuleItem:
    """A module: its parameters and persistent buffers."""

    name: str
    module: nn.Module
    trained: frozenset[int] = frozenset()  # ids of the parameters that an optimizer changes

    def __post_init__(self) -> None:
        self._known, self._tied, _ = named_tensors(self.module, self.name)

    def parameters(self) -> dict[int, str]:
        """The names of its parameters by their ids."""
        return {id(tensor): name for name, tensor in self._known.items() if isinstance(tensor, nn.Parameter)}

    def live(self) -> Live:
        """See Item."""
        now, tied, extra = named_tensors(self.module, self.name)
        # FSDP2 shows whole parameters between a forward and a backward pass. The sharded ones are the state.
        tensors = {
            name: known if isinstance(known := self._known.get(name), nn.Parameter) else tensor
            for name, tensor in now.items()
        }
        if now.keys() != self._known.keys() or tied != self._tied:
            changed = sorted(now.keys() ^ self._known.keys())[:_SHOWN] or sorted(tied.keys() ^ self._tied.keys())
            raise StateError(
                f"the tensors of {self.name} are not those of session.restore: {', '.join(changed)}; add or remove "
                "parameters before restore"
            )
        plain: dict[str, Any] = {"tied": tied} if tied else {}
        if extra:
            plain["extra"], more = tree.encode(
                {path: part.get_extra_state() for path, part in extra.items()}, f"{self.name}/extra"
            )
            tensors |= more
        steady = frozenset(name for name, tensor in tensors.items() if id(tensor) in self.trained)
        return Live(plain, tensors, steady)

    def targets(self, infos: Mapping[str, TensorInfo]) -> dict[str, Target]:
        """See Item."""
        fresh = {name: info for name, info in infos.items() if name.startswith(f"{self.name}/extra/")}
        _require_names(self.name, self._known.keys(), infos.keys() - fresh.keys())
        return {name: _target(name, tensor) for name, tensor in self._known.items()} | {
            name: fresh_target(name, info) for name, info in fresh.items()
        }

    def adopt(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """See Item."""
        if (tied := plain.get("tied", {})) != self._tied:
            raise StateError(f"{self.name}: the checkpoint ties {tied}, the module ties {self._tied}")
        states = tree.decode(plain.get("extra", {}), tensors, self.name)
        for path, part in named_tensors(self.module, self.name)[2].items():
            if path in states:
                part.set_extra_state(states[path])


@dataclass
class OptimizerItem:
    """An optimizer: the state of each parameter by its name, and its groups."""

    name: str
    optimizer: torch.optim.Optimizer
    names: Mapping[int, str]  # of all parameters of the modules, by their ids

    def __post_init__(self) -> None:
        self._parameters: dict[str, Tensor] = {}
        self._devices: dict[str, torch.device] = {}  # of the tensors to fill, by their full names
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter))
                if name is None:
                    raise StateError(
                        f"{self.name}: parameter {index} of group {number} is in no module of "
                        "session.restore; give its module, too, and make the optimizer after fully_shard"
                    )
                self._parameters[name] = parameter

    @property
    def trained(self) -> frozenset[int]:
        """The ids of its parameters."""
        return frozenset(map(id, self._parameters.values()))

    def live(self) -> Live:
        """See Item."""
        groups, tensors = tree.encode(self._groups(), f"{self.name}/groups")
        state: dict[str, Any] = {}
        host: list[str] = []
        steady: set[str] = set()
        for parameter_name, parameter in self._parameters.items():
            if parameter not in self.optimizer.state:
                continue
            entries: dict[str, Any] = {}
            for key, value in self.optimizer.state[parameter].items():
                full = f"{self.name}/{key}/{parameter_name}"
                if not isinstance(key, str) or "/" in key or key == "groups":
                    raise StateError(f"{self.name}: the state {key!r} of {parameter_name} needs a plain name")
                entries[key], more = tree.encode(value, full)
                tensors |= more
                host += [
                    name for name, one in more.items() if one.device.type == "cpu" and parameter.device.type != "cpu"
                ]
                if isinstance(value, Tensor):
                    tensors[full] = self._laid_out(value, parameter)
                    steady.add(full)
                elif any(isinstance(one, DTensor) for one in more.values()):
                    raise StateError(f"{full} has DTensors in a {type(value).__name__}, which cannot be restored")
            state[parameter_name] = entries
        plain = {"groups": groups, "state": state} | ({"host": host} if host else {})
        return Live(plain, tensors, frozenset(steady))

    def targets(self, infos: Mapping[str, TensorInfo]) -> dict[str, Target]:
        """See Item."""
        targets = {}
        for full, info in infos.items():
            key, _, name = full.removeprefix(f"{self.name}/").partition("/")
            if key == "groups":
                targets[full] = fresh_target(full, info)
                continue
            # A tensor in a list or dictionary of a parameter's state has a path below the name of the parameter.
            known = name in self._parameters
            owner = name if known else next((one for one in self._parameters if name.startswith(f"{one}/")), name)
            parameter = self._parameters.get(owner)
            if parameter is None:
                raise StateError(
                    f"the checkpoint has the state {key} of {name}, and {self.name} has no such parameter; its "
                    f"parameters are {some_names(self._parameters)}"
                )
            self._devices[full] = parameter.device
            if known and info.shape == tuple(parameter.shape):
                data = torch.empty_like(local_part(parameter), dtype=DTYPES[info.dtype])
                layout = replace(layout_of(full, parameter), name=full)
                targets[full] = Target(layout, data, lambda local, held=parameter: like(held, local))  # type: ignore[misc]
            else:
                targets[full] = fresh_target(full, info)
        return targets

    def adopt(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """See Item. Replaces the state without a step, and updates the groups in place."""
        groups = tree.decode(plain["groups"], tensors, self.name)
        own = self._groups()
        if [group["params"] for group in groups] != [group["params"] for group in own]:
            raise StateError(f"{self.name}: its groups have other parameters, or another order, than the checkpoint")
        host = set(plain.get("host", ()))
        placed = {full: tensors[full].to("cpu" if full in host else device) for full, device in self._devices.items()}
        for name, entries in plain["state"].items():
            self.optimizer.state[self._parameters[name]] = {
                key: tree.decode(value, placed, f"{self.name}/{key}/{name}") for key, value in entries.items()
            }
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self.names[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def _laid_out(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A tensor of the state with the layout of its parameter, where it holds the same part."""
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            sharded = value.shape == parameter.to_local().shape and value.dim() > 0
            return like(parameter, value) if sharded else value
        return value


@dataclass
class ValueItem:
    """An object with `state_dict` and `load_state_dict`, or a container or tensor that is updated in place."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        if not isinstance(self.value, Stateful | dict | list | Tensor | np.ndarray):
            kind = f"{type(self.value).__module__}.{type(self.value).__qualname__}"
            raise StateError(
                f"{self.name} is a {kind}, which cannot be restored in place; give a module, an optimizer, an object "
                "with state_dict() and load_state_dict(), a dict, a list or a tensor"
            )

    def live(self) -> Live:
        """See Item."""
        plain, tensors = tree.encode(self._state(), self.name)
        return Live(plain, tensors)

    def targets(self, infos: Mapping[str, TensorInfo]) -> dict[str, Target]:
        """See Item."""
        _, tensors = tree.encode(self._state(), self.name)
        in_place = not isinstance(self.value, Stateful)
        targets = {}
        for name, info in infos.items():
            live = tensors.get(name)
            target = None if live is None else _target(name, live)
            if (
                live is None
                or target is None
                or (target.layout.shape, dtype_name(target.data))
                != (
                    info.shape,
                    info.dtype,
                )
            ):
                targets[name] = fresh_target(name, info)
            elif in_place:
                targets[name] = target
            else:
                targets[name] = replace(target, finish=lambda local, held=live: like(held, local))  # type: ignore[misc]
        return targets

    def adopt(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """See Item."""
        value = tree.decode(plain, tensors, self.name)
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(value)
        elif isinstance(self.value, dict):
            self.value.clear()
            self.value.update(value)
        elif isinstance(self.value, list):
            self.value[:] = value
        elif isinstance(self.value, np.ndarray) or value is not self.value:
            if tuple(value.shape) != tuple(self.value.shape):
                raise StateError(f"{self.name}: has the shape {list(self.value.shape)}, saved was {list(value.shape)}")
            self.value[...] = value

    def _state(self) -> Any:
        return dict(self.value.state_dict()) if isinstance(self.value, Stateful) else self.value


def fresh_target(name: str, info: TensorInfo) -> Target:
    """A new whole tensor on the host."""
    return Target(TensorLayout(name, info.shape), torch.empty(info.shape, dtype=DTYPES[info.dtype]))


def _require_names(item: str, own: Sequence[str] | Any, saved: Any) -> None:
    missing, unknown = sorted(own - saved), sorted(saved - own)
    if missing or unknown:
        raise StateError(
            f"{item} is not the module of the checkpoint. Only here: {some_names(missing)}. Only in the checkpoint: "
            f"{some_names(unknown)}. Change the module back, or start another run"
        )


def some_names(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return (", ".join(listed[:_SHOWN]) or "nothing") + more
