"""All state of a script as boxes of a checkpoint, and back: its objects (`items`), global and per rank."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint import StateDigest, TensorBox, box_digests
from holdfast.checkpoint.catalogue import Catalogue
from holdfast.collectives import Gang
from holdfast.engines.layout import TensorLayout, share_out
from holdfast.script import tree
from holdfast.script.items import (
    Item,
    ModuleItem,
    OptimizerItem,
    Target,
    ValueItem,
    dtype_name,
    fresh_target,
    layout_of,
    local_part,
    original,
    some_names,
    stored,
)
from holdfast.script.tree import StateError

TREE = "state.json"  # the box with the plain values
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
                    if (data := stored(local_part(tensor))).dtype != tensor.dtype:
                        root["dtypes"][full] = dtype_name(tensor)
                    layout = self._shared(layout_of(full, tensor), own)
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
        self._targets[TREE] = fresh_target(TREE, catalogue[TREE])
        if self._own_tree in catalogue:
            self._targets[self._own_tree] = fresh_target(self._own_tree, catalogue[self._own_tree])
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
            name: target.finish(original(target.data, dtypes[name]) if name in dtypes else target.data)
            for name, target in self._targets.items()
        }
        for items, saved in ((self._global, root["items"]), (self._own, own_root["items"])):
            if items.keys() != saved.keys():
                raise StateError(
                    f"session.restore got {some_names(sorted(items))}; the checkpoint has {some_names(sorted(saved))}. "
                    "Give the same names, or start another run"
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
            f"step {step}: {some_names(names)} differ between the ranks{detail}. Make them equal on every rank, or "
            "give the object under per_rank=. Nothing of this step was saved"
        )
