"""Published names of weights: the canonical names of most tensors, and separate names for each expert.

Canonical names are those of the class in `transformers`, in which one matrix holds the experts of a layer, one below
the other. Files have separate matrices for each expert, under names of the family. Files of gpt-oss have one tensor
for the experts of a layer, each transposed, and those of phi3 have fused matrices of queries, keys and values.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.model.initialise import parameter_shapes
from holdfast.spec.model import Model

# names of an expert's matrices: gate and up, which are one matrix, and down
_LLAMA = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED = re.compile(r"\b(q_proj|k_proj|v_proj|gate_proj|up_proj)\b")  # of phi3: one matrix of several, below another
_MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class Rows(NamedTuple):
    """Rows of a canonical tensor that are published in one tensor."""

    tensor: str
    first: int
    shape: tuple[int, ...]
    at: int = 0  # the first of these rows in the published tensor, which may have rows of several tensors
    experts: int = 0  # if not 0: the published tensor has these experts along its first axis, each transposed

    @property
    def published_shape(self) -> tuple[int, ...]:
        """The shape of the published tensor, if it has no other rows."""
        if not self.experts:
            return self.shape
        return (self.experts, *self.shape[1:], self.shape[0] // self.experts)


def published(model: Model, vocabulary: int) -> dict[str, list[Rows]]:
    """The content of a model's files, by published name. It has each row of each canonical tensor once, in order."""
    names: dict[str, list[Rows]] = {}
    for name, shape in parameter_shapes(model, vocabulary).items():
        layer, experts, matrix = name.partition(".mlp.experts.")
        if experts and model.family == "gpt_oss":
            names[name] = [Rows(name, 0, shape, experts=model.experts)]
        elif experts:
            names |= _of_experts(model, name, layer, matrix, shape)
        else:
            parts = names.setdefault(_published_name(model.family, name), [])
            parts.append(Rows(name, 0, shape, at=sum(part.shape[0] for part in parts)))
    return names


def shape_of(parts: Sequence[Rows]) -> tuple[int, ...]:
    """The shape of a published tensor."""
    first = parts[0]
    return first.published_shape if len(parts) == 1 else (sum(part.shape[0] for part in parts), *first.shape[1:])


def rows_of(files: Mapping[str, list[Rows]]) -> dict[str, list[tuple[str, Rows]]]:
    """By canonical name: the published tensors that make it up, in the order of its rows."""
    by_tensor: dict[str, list[tuple[str, Rows]]] = {}
    for name, parts in files.items():
        for rows in parts:
            by_tensor.setdefault(rows.tensor, []).append((name, rows))
    return by_tensor


def _published_name(family: str, name: str) -> str:
    """The published name of a tensor that is no expert's."""
    if family == "mixtral" and name.endswith(".mlp.gate.weight"):
        return name.replace(".mlp.", ".block_sparse_moe.")
    if family == "gpt_oss":
        return name.replace(".mlp.gate.", ".mlp.router.")
    if family == "phi3":
        return _FUSED.sub(
            lambda match: "qkv_proj" if match[0] in ("q_proj", "k_proj", "v_proj") else "gate_up_proj", name
        )
    return name


def _of_experts(model: Model, name: str, layer: str, matrix: str, shape: tuple[int, ...]) -> dict[str, list[Rows]]:
    mixtral = model.family == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    parts = (_MIXTRAL if mixtral else _LLAMA)[matrix]
    height = shape[0] // (model.experts * len(parts))
    return {
        f"{layer}.{block}.experts.{expert}.{part}.weight": [
            Rows(name, (expert * len(parts) + index) * height, (height, *shape[1:]))
        ]
        for expert in range(model.experts)
        for index, part in enumerate(parts)
    }
