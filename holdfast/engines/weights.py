"""First state of a model: seeded initialization, or imported weights.

Both fill boxes, as a checkpoint does, so an engine has one way to receive its state at any layout.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from holdfast.checkpoint import TensorBox
from holdfast.checkpoint.root import UnfitError
from holdfast.engines.assignment import Assignment
from holdfast.engines.mesh import STAGES_EACH
from holdfast.engines.packed_base import Packed, PackedBase
from holdfast.model import nf4
from holdfast.model.decoder import SCORE
from holdfast.model.hugging_face import open_weights, require_fit
from holdfast.model.initialise import AVERAGE, BLOCK, initial_slice
from holdfast.model.lora import is_adapter
from holdfast.runtime.environment import cache_dir
from holdfast.spec.errors import DataError
from holdfast.spec.model import Model
from holdfast.spec.parallel import Parallel

# AdamW's state of every weight: torch's name -> prefix of the canonical name.
MOMENTS = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
OPTIMIZER = "optimizer."  # names of state that an optimizer keeps for a weight begin with it
COUNTER = "step"  # key of the state that counts updates, which is a scalar of the checkpoint


def state_prefix(key: str) -> str:
    """The prefix of the names of an optimizer's state `key`, before the name of the weight."""
    return f"{OPTIMIZER}{key}."


# Canonical prefix of the error that gradient compression keeps for every weight on every rank.
LEFT_OUT = "compression.error."
CODES, SCALES = ".codes", ".scales"  # suffixes of an NF4 matrix, after its name
TEACHER = "teacher."  # prefix of the names of a teacher's weights
FILL_ELEMENTS = 8 * BLOCK  # generated or read per chunk


class FirstState(Protocol):
    """A source of the state before the first step."""

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """Write the state into `boxes`, in place."""


class SeededState:
    """Random weights, the same at every layout. Moments are zero."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self._seed = model, seed

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        for box in boxes:
            if not _zero_moment(box):
                self._fill(box)

    def _fill(self, box: TensorBox) -> None:
        """Generate whole rows of the box's tensor, some at a time, and keep the box's columns."""
        row = math.prod(box.global_shape[1:])
        columns = tuple(slice(low, low + size) for low, size in zip(box.offset[1:], box.data.shape[1:], strict=True))
        for part, first in parts_of(box, max(1, FILL_ELEMENTS // max(1, row))):
            values = initial_slice(
                box.name, box.global_shape, self._model, self._seed, start=first * row, stop=(first + len(part)) * row
            )
            with torch.no_grad():
                part.copy_(values.view(len(part), *box.global_shape[1:])[(slice(None), *columns)])


class ImportedState:
    """Weights in the Hugging Face layout. Moments are zero."""

    def __init__(
        self, location: str, model: Model | None, vocabulary: int, packed_base: PackedBase | None = None
    ) -> None:
        """Open the folder or s3:// URL `location`. NF4 matrices are read from `packed_base`, and are kept there. Raises
        DataError if its shape differs from the spec's `model`."""
        self._weights, self._packed_base = open_weights(location, cache_dir()), packed_base
        self._packed: tuple[str, Packed] | None = None  # the last matrix by its name
        if model is not None:
            require_fit(self._weights, model, vocabulary)

    def has(self, name: str) -> bool:
        """Whether the weights have a tensor. Of all tensors, only a scalar head may be missing."""
        return not name.endswith(SCORE) or SCORE in self._weights.shapes

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        for box in boxes:
            if box.name.endswith((CODES, SCALES)):
                whole = self._quantised(box.name.rpartition(".")[0])[box.name.endswith(SCALES)]
                place = zip(box.offset, box.data.shape, strict=True)
                with torch.no_grad():
                    box.data.copy_(whole[tuple(slice(low, low + size) for low, size in place)])
            elif not _zero_moment(box):
                self._fill(box)

    def _quantised(self, name: str) -> Packed:
        """The codes and scales of a whole matrix."""
        if self._packed is None or self._packed[0] != name:
            base = self._packed_base
            rows, columns = self._weights.shapes[name]
            found = None if base is None else base.read(name, (rows, columns))
            if found is None:
                slabs = [nf4.quantise(slab) for slab in self._weights.rows(name)]  # a row has whole blocks
                codes, scales = (torch.cat(parts) for parts in zip(*slabs, strict=True))
                found = codes, scales
                if base is not None:
                    base.keep(name, found)
            self._packed = name, found
        return self._packed[1]

    def _fill(self, box: TensorBox) -> None:
        rows = max(1, FILL_ELEMENTS // max(1, math.prod(box.data.shape[1:])))
        columns = tuple(slice(low, low + size) for low, size in zip(box.offset[1:], box.data.shape[1:], strict=True))
        for part, first in parts_of(box, rows):
            with torch.no_grad():
                part.copy_(self._weights.part(box.name, (slice(first, first + len(part)), *columns)))


class TaughtState:
    """The first state of a distillation: that of the model, and the weights of its teacher."""

    def __init__(self, own: FirstState, teacher: ImportedState) -> None:
        self._own, self._teacher = own, teacher

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        self._own.fill([box for box in boxes if not box.name.startswith(TEACHER)])
        taught = [box for box in boxes if box.name.startswith(TEACHER)]
        self._teacher.fill([replace(box, name=box.name.removeprefix(TEACHER)) for box in taught])


def teacher_shape(spec: Assignment, vocabulary: int) -> Model:
    """The shape of the teacher, from its config.json, with the context of the run. Raises DataError for one that does
    not fit."""
    location = spec.training.distillation.teacher
    assert location is not None, "the spec requires a teacher for distillation"
    weights = open_weights(location, cache_dir())
    field = f"training.distillation.teacher: {location}"
    if weights.vocabulary != vocabulary:
        raise DataError(
            f"{field} has a vocabulary of {weights.vocabulary}, and the run one of {vocabulary}; use a teacher with "
            "the tokenizer of data.tokenizer"
        )
    if spec.training.distillation.top_k > vocabulary:
        raise DataError(
            f"training.distillation.top_k: {spec.training.distillation.top_k} is more than the {vocabulary} tokens of "
            f"the vocabulary; use at most {vocabulary}"
        )
    if weights.shape.context < spec.model.context:
        raise DataError(
            f"{field} has a context of {weights.shape.context}, shorter than model.context = {spec.model.context}; "
            "lower that, or use another teacher"
        )
    if weights.shape.head != "tokens":
        raise DataError(f"{field} is a reward model, and predicts no tokens; use another teacher")
    _require_divisible(weights.shape, spec.parallel, field)
    return weights.shape.model_copy(update={"context": spec.model.context})


class AveragedState:
    """A first state with averages of its weights, which begin as the weights."""

    def __init__(self, own: FirstState) -> None:
        self._own = own

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        self._own.fill([replace(box, name=box.name.removeprefix(AVERAGE)) for box in boxes])


def _require_divisible(teacher: Model, parallel: Parallel, field: str) -> None:
    """Raises DataError for a teacher that cannot be laid out over the ranks like the model."""
    stages = parallel.pipeline * STAGES_EACH[parallel.schedule]
    if teacher.layers < stages:
        raise DataError(f"{field} has {teacher.layers} layers, fewer than the {stages} stages of parallel.pipeline")
    shared = teacher.routing.shared * teacher.ffn_width if teacher.experts > 1 else teacher.ffn_width
    dense = teacher.dense_width if teacher.dense_layers else 0
    for what, size, name in (
        ("heads", teacher.heads, "tensor"),
        ("heads of keys and values", teacher.key_value_heads, "tensor"),
        ("columns in its feed-forward layers", shared, "tensor"),
        ("columns in its dense layers", dense, "tensor"),
        ("experts", teacher.experts if teacher.experts > 1 else 0, "expert"),
    ):
        if size % (ranks := getattr(parallel, name)):
            raise DataError(f"{field} has {size} {what}, which parallel.{name} = {ranks} does not divide")


class AdaptedState:
    """Imported weights with new adapters, and with a new head if they have another one."""

    def __init__(self, base: ImportedState, new: FirstState) -> None:
        self._base, self._new = base, new

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        is_new = {box.name: is_adapter(box.name) or not self._base.has(box.name) for box in boxes}
        self._base.fill([box for box in boxes if not is_new[box.name]])
        self._new.fill([box for box in boxes if is_new[box.name]])


def require_left_out_taken(names: Iterable[str], boxes: Sequence[TensorBox]) -> None:
    """Raises UnfitError if a checkpoint with these tensors holds compression errors and no box takes them. A single
    rank compresses nothing, and the errors would be lost silently."""
    if any(box.name.startswith(LEFT_OUT) for box in boxes):
        return  # all errors fit, or the checkpoint was refused before
    if name := next((name for name in names if name.startswith(LEFT_OUT)), None):
        raise UnfitError(
            f"{name}: the checkpoint holds what each of its ranks left out of gradients, and one rank alone takes none "
            "of it: continue with the number of ranks that wrote it"
        )


def parts_of(box: TensorBox, rows: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The box's data, `rows` at a time, and the index of each part's first row in the global tensor."""
    if box.data.numel():
        for start in range(0, len(box.data), rows):
            yield box.data[start : start + rows], box.offset[0] + start


def _zero_moment(box: TensorBox) -> bool:
    if box.name.startswith((OPTIMIZER, LEFT_OUT)):
        with torch.no_grad():
            box.data.zero_()
        return True
    return False
