"""Frozen models of an objective: the reference model and the teacher, in the layout of the trained model."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.layout import TensorLayout
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch.balance import Balance
from holdfast.engines.torch.context import SequenceShard
from holdfast.engines.torch.parallelize import Topology, build_expert_mesh, parallelize
from holdfast.engines.torch.pipeline import build_parts
from holdfast.engines.weights import CODES, SCALES, TEACHER, teacher_shape
from holdfast.model.decoder import Decoder
from holdfast.model.lora import FrozenExperts, FrozenLinear
from holdfast.objectives.interface import Objective
from holdfast.spec.model import Model


class FrozenModels:
    """The stages of the reference model and of the teacher on this rank. A list is empty if the objective needs no such
    model. With adapters the model without them is the reference, so there is no other."""

    def __init__(
        self,
        spec: Assignment,
        vocabulary: int,
        objective: Objective,
        topology: Topology,
        sequence: SequenceShard | None,
        rank: int,
    ) -> None:
        """`sequence` is this rank's part of every row. Raises DataError for a teacher that does not fit. A collective
        call."""
        self._spec, self._vocabulary, self._rank = spec, vocabulary, rank
        self._topology, self._sequence = topology, sequence
        has_reference = "reference" in objective.needs and spec.training.lora.rank is None
        self.reference = self._parts(spec.model) if has_reference else []
        self.teacher: list[Decoder] = []
        if "teacher" in objective.needs:
            self.teacher = self._parts(teacher_shape(spec, vocabulary))
            for stage in self.teacher:
                stage.top = spec.training.distillation.top_k
                stage.temperature = spec.training.distillation.temperature

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parts of the weights of both models."""
        return chain.from_iterable(part.parameters() for part in (*self.reference, *self.teacher))

    def boxes(self) -> Iterator[TensorBox]:
        """This rank's boxes of the weights of both models. The biases of routers are no parameters."""
        for prefix, parts in (("", self.reference), (TEACHER, self.teacher)):
            for part in parts:
                for name, tensor in chain(part.named_parameters(), Balance([part], part.shape.routing).state()):
                    yield TensorLayout.of(prefix + name, tensor).box(tensor)

    def _parts(self, model: Model) -> list[Decoder]:
        spec, topology = self._spec, self._topology
        with torch.device("meta"):
            parts = build_parts(model, self._vocabulary, spec.parallel, topology.mesh, self._rank)
        alone = topology.ranks is None  # no rank needs the weights of another one
        layout = replace(topology, mesh=Mesh(replicas=1, shards=1, tensor=1) if alone else topology.mesh)
        if model.experts != spec.model.experts:
            layout = replace(layout, experts=build_expert_mesh(topology.mesh, topology.device, model.experts))
        for part in parts:
            part.requires_grad_(False).loss_chunk = spec.training.loss_chunk
            part.compiled = spec.training.compile
            parallelize(part, spec.training, spec.parallel, layout, grid=None, sequence_shard=self._sequence)
            part.eval()  # its routers count no tokens
        return parts


def base_boxes(parts: list[Decoder]) -> Iterator[TensorBox]:
    """This rank's boxes of the frozen weights of a model with adapters. A matrix that is stored in NF4 has two."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                yield TensorLayout.of(name, parameter).box(parameter)
        for name, module in part.named_modules():
            if isinstance(module, FrozenLinear | FrozenExperts):
                for matrix, codes, scales in module.packed_matrices():
                    for suffix, part_of_matrix in ((CODES, codes), (SCALES, scales)):
                        yield TensorLayout.of(f"{name}.{matrix}{suffix}", part_of_matrix).box(part_of_matrix)
