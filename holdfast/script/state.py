"""State of a script's objects as boxes of a checkpoint, by name, and back.

Modules are carried by the names of their parameters and buffers. The state of an optimizer is carried by the names of
its parameters. It is created from the catalogue of the checkpoint, without an optimizer step. Other objects are
carried as what `state_dict` returns: plain values as JSON in a tensor of bytes, and their tensors apart. What cannot be
carried raises StateError with its path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import StateDigest, TensorBox, box_digests
from holdfast.checkpoint.box import DTYPES
from holdfast.checkpoint.catalogue import Catalogue, TensorInfo
from holdfast.collectives import Gang
from holdfast.engines.layout import TensorLayout, like, share_out
from holdfast.script import tree
from holdfast.script.tree import StateError

TREE = "state.json"  # the box with the plain values
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


def _original(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor of which `stored` made a view, from the name of its dtype."""
    wanted: torch.dtype = getattr(torch, dtype)
    return torch.view_as_complex(tensor) if wanted.is_complex else tensor.view(wanted)


def _target(name: str, tensor: Tensor) -> Target:
    """A target whose content replaces that of a live tensor."""
    data = torch.empty_like(stored(_local(tensor)))
    return Target(_layout(name, tensor), data, lambda local: _replace(tensor, local))


def _replace(tensor: Tensor, local: Tensor) -> Tensor:
    with torch.no_grad():
        _local(tensor).copy_(local)
    return tensor


def _layout(name: str, tensor: Tensor) -> TensorLayout:
    if tensor.is_complex():
        if isinstance(tensor, DTensor):
            raise StateError(f"{name} is a DTensor of complex numbers; keep its real and imaginary part apart")
        return TensorLayout(name, (*tensor.shape, 2))
    try:
        return TensorLayout.of(name, tensor)
    except ValueError as error:
        raise StateError(f"{error}; sum it first, for instance by full_tensor()") from None


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _dtype_name(tensor: Tensor) -> str:
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
            name: _fresh(name, info) for name, info in fresh.items()
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
                targets[full] = _fresh(full, info)
                continue
            # A tensor in a list or dictionary of a parameter's state has a path below the name of the parameter.
            known = name in self._parameters
            owner = name if known else next((one for one in self._parameters if name.startswith(f"{one}/")), name)
            parameter = self._parameters.get(owner)
            if parameter is None:
                raise StateError(
                    f"the checkpoint has the state {key} of {name}, and {self.name} has no such parameter; its "
                    f"parameters are {_some(self._parameters)}"
                )
            self._devices[full] = parameter.device
            if known and info.shape == tuple(parameter.shape):
                data = torch.empty_like(_local(parameter), dtype=DTYPES[info.dtype])
                layout = replace(_layout(full, parameter), name=full)
                targets[full] = Target(layout, data, lambda local, held=parameter: like(held, local))  # type: ignore[misc]
            else:
                targets[full] = _fresh(full, info)
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
                or (target.layout.shape, _dtype_name(target.data))
                != (
                    info.shape,
                    info.dtype,
                )
            ):
                targets[name] = _fresh(name, info)
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


def _fresh(name: str, info: TensorInfo) -> Target:
    """A new whole tensor on the host."""
    return Target(TensorLayout(name, info.shape), torch.empty(info.shape, dtype=DTYPES[info.dtype]))


def _require_names(item: str, own: Sequence[str] | Any, saved: Any) -> None:
    missing, unknown = sorted(own - saved), sorted(saved - own)
    if missing or unknown:
        raise StateError(
            f"{item} is not the module of the checkpoint. Only here: {_some(missing)}. Only in the checkpoint: "
            f"{_some(unknown)}. Change the module back, or start another run"
        )


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return (", ".join(listed[:_SHOWN]) or "nothing") + more


@dataclass
class ScriptState:
    """All state of a script on one rank. `items` are global, `per_rank` belong to this rank alone."""

    items: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    gang: Gang
    _targets: dict[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.items, *self.per_rank):
            if not _NAME.fullmatch(name):
                raise StateError(f"{name!r} is no name of an item; use letters, digits and _")
        if both := self.items.keys() & self.per_rank.keys():
            raise StateError(f"{', '.join(both)}: given both as global and per rank")
        modules = {name: ModuleItem(name, one) for name, one in self.items.items() if isinstance(one, nn.Module)}
        names: dict[int, str] = {}
        for module in modules.values():
            for identity, full in module.parameters().items():
                if names.setdefault(identity, full) != full:
                    raise StateError(f"{full} and {names[identity]} are one tensor in two items; give one of them")
        optimizers = {
            name: OptimizerItem(name, one, names)
            for name, one in self.items.items()
            if isinstance(one, torch.optim.Optimizer)
        }
        trained = frozenset[int]().union(*(one.trained for one in optimizers.values()))
        for module in modules.values():
            module.trained = trained
        self._global: dict[str, Item] = {
            name: modules.get(name) or optimizers.get(name) or ValueItem(name, one) for name, one in self.items.items()
        }
        self._own: dict[str, Item] = {name: ValueItem(self._prefix + name, one) for name, one in self.per_rank.items()}
        self.live()  # refuse now what could not be saved later

    @property
    def _prefix(self) -> str:
        return f"rank-{self.gang.rank:05d}/"

    @property
    def _own_tree(self) -> str:
        return f"{TREE}/{self._prefix.rstrip('/')}"

    def live(self) -> list[tuple[TensorLayout, TensorBox]]:
        """The boxes of this rank with their layouts. Tensors that may change before the next optimizer step are
        copied."""
        held: list[tuple[TensorLayout, TensorBox]] = []
        for items, own in ((self._global, False), (self._own, True)):
            if own and not items:
                continue
            root: dict[str, Any] = {"version": 1, "items": {}, "dtypes": {}} | (
                {"world": self.gang.size} if own else {}
            )
            for name, item in items.items():
                live = item.live()
                root["items"][name] = live.plain
                for full, tensor in live.tensors.items():
                    if (data := stored(_local(tensor))).dtype != tensor.dtype:
                        root["dtypes"][full] = _dtype_name(tensor)
                    layout = self._shared(_layout(full, tensor), own)
                    held.append((layout, layout.box(data if full in live.steady else data.clone())))
            text = tree.to_bytes(root)
            layout = self._shared(TensorLayout(self._own_tree if own else TREE, tuple(text.shape)), own)
            held.append((layout, layout.box(text)))
        return held

    def _shared(self, layout: TensorLayout, own: bool) -> TensorLayout:
        """The layout of a tensor that every rank holds, or only this one."""
        return layout if own or layout.mesh else layout.among(self.gang.size, self.gang.rank)

    def boxes(self, catalogue: Catalogue | None) -> list[TensorBox]:
        """The boxes to fill from a checkpoint. None without one: the state stays as it is."""
        self._targets = {}
        if catalogue is None:
            return []
        if TREE not in catalogue:
            raise StateError("the checkpoint was not saved by a script; train.script needs a separate run")
        self._targets[TREE] = _fresh(TREE, catalogue[TREE])
        if self._own_tree in catalogue:
            self._targets[self._own_tree] = _fresh(self._own_tree, catalogue[self._own_tree])
        for items, prefix in ((self._global, ""), (self._own, self._prefix)):
            for name, item in items.items():
                path = prefix + name
                infos = {full: info for full, info in catalogue.items() if full == path or full.startswith(f"{path}/")}
                self._targets |= item.targets(infos)
        return [target.box for target in self._targets.values()]

    def adopt(self) -> None:
        """Give the objects the state that the boxes hold now. Optimizers come before modules, whose weights are already
        in place."""
        root = tree.from_bytes(self._targets[TREE].data, TREE)
        own = self._targets.get(self._own_tree)
        own_root: dict[str, Any] = {"items": {}, "dtypes": {}, "world": "other"}
        if own is not None:
            own_root = tree.from_bytes(own.data, self._own_tree)
        if (self._own or own is not None) and (world := own_root["world"]) != self.gang.size:
            entries = ", ".join(self._own) or "of the checkpoint"
            raise StateError(
                f"the checkpoint has state per rank ({entries}) of {world} ranks, and there are {self.gang.size}; "
                "restore it with the same number of ranks, or save it as global state"
            )
        dtypes = root["dtypes"] | own_root["dtypes"]
        tensors = {
            name: target.finish(_original(target.data, dtypes[name]) if name in dtypes else target.data)
            for name, target in self._targets.items()
        }
        for items, saved in ((self._global, root["items"]), (self._own, own_root["items"])):
            if items.keys() != saved.keys():
                raise StateError(
                    f"session.restore got {_some(sorted(items))}; the checkpoint has {_some(sorted(saved))}. Give the "
                    "same names, or start another run"
                )
        for items, saved in ((self._global, root["items"]), (self._own, own_root["items"])):
            for name in sorted(items, key=lambda one: not isinstance(items[one], OptimizerItem)):
                items[name].adopt(saved[name], tensors)
        self._targets = {}

    def saved(self, held: Sequence[tuple[TensorLayout, TensorBox]]) -> list[TensorBox]:
        """The boxes that this rank saves. Together, those of all ranks contain every tensor exactly once."""
        return share_out(held)

    def require_equal(self, held: Sequence[tuple[TensorLayout, TensorBox]], step: int) -> None:
        """Compare what several ranks hold. A collective call. Raises StateError with the names of tensors that
        differ."""
        if self.gang.size == 1:
            return
        groups: dict[str, list[TensorBox]] = {}
        for layout, box in held:
            if layout.copies > 1:
                groups.setdefault(str(layout.copied), []).append(box)
        own = {key: box_digests(boxes) for key, boxes in groups.items()}
        sums = self.gang.all_gather(
            {key: sum(ones, StateDigest()) for key, ones in own.items()}, dict[str, StateDigest]
        )
        keys = {key for one in sums for key in one}
        differing = sorted(key for key in keys if len({str(one[key]) for one in sums if key in one}) > 1)
        if not differing:
            return
        key = differing[0]
        digests = {box.name: digest for box, digest in zip(groups.get(key, []), own.get(key, []), strict=True)}
        named = [one for one in self.gang.all_gather(digests, dict[str, StateDigest]) if one]
        names = sorted(name for name in named[0] if any(one.get(name) != named[0][name] for one in named))
        detail = ""
        if TREE in names:
            plain = next(tree.from_bytes(box.data, TREE) for layout, box in held if box.name == TREE)["items"]
            first = self.gang.broadcast(plain, dict[str, Any])
            found = self.gang.all_gather(tree.differing_paths(first, plain), list[str])
            detail = f" ({'; '.join(next((one for one in found if one), []))})"
        raise StateError(
            f"step {step}: {_some(names)} differ between the ranks{detail}. Make them equal on every rank, or give the "
            "object under per_rank=. Nothing of this step was saved"
        )
