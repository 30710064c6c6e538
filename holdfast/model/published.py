"""Published names of weights: the canonical names of most tensors, and separate names for each expert.

Canonical names are those of the class in `transformers`, in which one matrix holds the experts of a layer, one below
the other. Files have separate matrices for each expert, under names of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.model.initialise import parameter_shapes
from holdfast.spec.model import Model

# names of an expert's matrices: gate and up, which are one matrix, and down
_LLAMA = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class Rows(NamedTuple):
    """Rows of a canonical tensor that are published as one tensor."""

    tensor: str
    first: int
    shape: tuple[int, ...]


def published(model: Model, vocabulary: int) -> dict[str, Rows]:
    """The content of a model's files, by published name. It has each row of each canonical tensor once, in order."""
    names: dict[str, Rows] = {}
    for name, shape in parameter_shapes(model, vocabulary).items():
        layer, experts, matrix = name.partition(".mlp.experts.")
        if experts:
            names |= _of_experts(model, name, layer, matrix, shape)
        else:
            mixtral = model.family == "mixtral" and name.endswith(".mlp.gate.weight")
            names[name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name] = Rows(name, 0, shape)
    return names


def rows_of(files: Mapping[str, Rows]) -> dict[str, list[tuple[str, Rows]]]:
    """By canonical name: the published tensors that make it up, in the order of its rows."""
    by_tensor: dict[str, list[tuple[str, Rows]]] = {}
    for name, rows in files.items():
        by_tensor.setdefault(rows.tensor, []).append((name, rows))
    return by_tensor


def _of_experts(model: Model, name: str, layer: str, matrix: str, shape: tuple[int, ...]) -> dict[str, Rows]:
    mixtral = model.family == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    parts = (_MIXTRAL if mixtral else _LLAMA)[matrix]
    height = shape[0] // (model.experts * len(parts))
    return {
        f"{layer}.{block}.experts.{expert}.{part}.weight": Rows(
            name, (expert * len(parts) + index) * height, (height, *shape[1:])
        )
        for expert in range(model.experts)
        for index, part in enumerate(parts)
    }
