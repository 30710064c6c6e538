"""Gradient accumulation: forward and backward pass of all micro-batches of a step, one class for each kind of layout.

`Micro` is what all of them share: one micro-batch on this rank. The classes differ in what happens between
micro-batches and between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.engines.grid import Grid
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch.balance import Balance
from holdfast.engines.torch.context import SequenceShard
from holdfast.engines.torch.elastic import GradientSums, over_grains
from holdfast.engines.torch.parallelize import Topology
from holdfast.engines.torch.parameters import TrainedParameters
from holdfast.engines.torch.pipeline import Pipeline
from holdfast.engines.torch.scaling import LossScale
from holdfast.engines.torch.tied import TiedEnds
from holdfast.model.lora import without_adapters
from holdfast.model.token_logprobs import IGNORED, Likeliest
from holdfast.objectives.interface import Objective, ObjectiveInputs, weighted
from holdfast.objectives.micro_batches import MicroBatch, micro_batches
from holdfast.telemetry import phases


class Accumulation(Protocol):
    """Computes the gradient of a step."""

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """Accumulate the gradient of the loss of the global batch, of which `rows` are this rank's, on the CPU.
        `counted` are the divisors of the objective's terms. Returns the values of the terms. `divergence`: see
        `ObjectiveInputs`. A collective call."""

    def warm_up_rows(self) -> int:
        """The number of rows for a pass that uses all that a step uses."""


class StepGrid:
    """The grid of the current step under elastic determinism. A growing batch has more grains in later steps."""

    def __init__(self, grid: Grid) -> None:
        self.now = grid

    def __call__(self) -> Grid:
        """The grid."""
        return self.now


@dataclass(frozen=True)
class ReferenceModel:
    """The frozen model that an objective compares with: other weights, or the trained model without its adapters."""

    module: nn.Module

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        """See `TokenLosses`."""
        with torch.no_grad(), without_adapters(self.module):
            losses: torch.Tensor = self.module(batch.tokens, batch.targets, batch.segments, reduction="none")
        return losses


class Teacher(NamedTuple):
    """The frozen model whose likeliest tokens a model learns."""

    module: nn.Module
    top: int  # tokens of each position


@dataclass(frozen=True)
class MicroSettings:
    """What a micro-batch is computed with."""

    size: int  # rows
    end_of_text: int | None  # ends a document; None: without masks
    narrow: torch.dtype | None  # of autocast
    sequence: SequenceShard | None  # this rank's part of every row


@dataclass(frozen=True)
class Micro:
    """One micro-batch on this rank: inputs, loss and gradient."""

    policy: nn.Module  # the trained model, or this rank's part of it
    objective: Objective
    reference: ReferenceModel | None
    loss_scale: LossScale | None
    topology: Topology
    settings: MicroSettings
    teacher: Teacher | None = None

    def batches(self, rows: torch.Tensor, size: int | None = None) -> Iterator[MicroBatch]:
        """Inputs and targets of this rank's sequence shard, and the documents of whole sequences. `rows` are on the
        CPU."""
        shard = self.settings.sequence
        for batch in micro_batches(rows, size or self.settings.size, self.settings.end_of_text, self.topology.device):
            if shard is None:
                yield batch
            else:
                tokens, targets, marks = map(shard.of_each, (batch.tokens, batch.targets, batch.marks))
                yield batch._replace(tokens=tokens, targets=targets, marks=marks)

    def upscaled(self, share: torch.Tensor) -> torch.Tensor:
        """Multiply `share` by the loss scale in fp16."""
        return share if self.loss_scale is None else share * self.loss_scale.scale

    def given(self, batch: MicroBatch, divergence: torch.Tensor | None = None) -> ObjectiveInputs:
        """What the objective needs of a micro-batch, in the arithmetic of the forward pass."""
        narrow = self.settings.narrow
        with torch.autocast(self.topology.device.type, narrow, enabled=narrow is not None):
            reference = None if self.reference is None else self.reference(batch)
            if "logits" in self.objective.needs:
                logits = self.policy(batch.tokens, None, batch.segments)
                return ObjectiveInputs(logits.new_empty(0), reference, divergence, logits=logits)
            targets, teacher = batch.targets, None
            if self.teacher is not None:
                module, top = self.teacher
                with torch.no_grad():
                    teacher = Likeliest(*module(batch.tokens, None, batch.segments, likeliest=top))
                theirs = teacher.tokens.where(targets[..., None] != IGNORED, IGNORED)
                targets = torch.cat((targets[..., None], theirs), -1)
            losses = self.policy(batch.tokens, targets, batch.segments, reduction="none")
        return ObjectiveInputs(losses, reference, divergence, teacher)

    def compute(self, batch: MicroBatch, share: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward pass. The gradient is that of the weighted sum of the terms times `share`. Returns the
        sums of the terms."""
        phases.enter("forward")
        sums = self.objective.sums(self.given(batch, divergence), batch)
        phases.enter("backward")
        weighted(self.objective, sums * share).backward()
        return sums.detach()


@dataclass(frozen=True)
class DataParallel:
    """Replicas or shards: each rank computes other rows, and gradients are averaged over the ranks."""

    micro: Micro
    world: int
    contributes_loss: bool

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """See Accumulation."""
        mesh = self.micro.topology.mesh
        # Gradient averaging divides by the number of ranks, so multiply by it here.
        share = self.micro.upscaled(mesh.averaged / counted)
        total = torch.zeros_like(counted)
        remaining = -(-len(rows) // self.micro.settings.size)
        for batch in self.micro.batches(rows):
            remaining -= 1
            with self._gradient_sync(mesh, last=remaining == 0):
                total += self.micro.compute(batch, share, divergence)
        if self.world > 1:
            phases.enter("communication")
            dist.all_reduce(total.mul_(self.contributes_loss))
        return total / counted

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size

    def _gradient_sync(self, mesh: Mesh, last: bool) -> AbstractContextManager[None]:
        """Synchronize gradients in the last micro-batch only, where that saves communication.

        DDP holds whole gradients and reduces them over the ranks once. FSDP2 adds each micro-batch to its own gradient
        shard, so it never holds more than one layer's whole gradient. Replicas of shards are averaged once.
        """
        policy = self.micro.policy
        if isinstance(policy, DistributedDataParallel) and not last:
            return policy.no_sync()
        if isinstance(policy, FSDPModule) and mesh.replicas > 1:
            policy.set_requires_all_reduce(last)
        return nullcontext()


@dataclass(frozen=True)
class PipelineStages:
    """Pipeline stages: every rank has the rows of its data-parallel group, and the last stage has the loss. The
    objective is the next token."""

    micro: Micro
    pipeline: Pipeline
    tied: TiedEnds | None
    parameters: TrainedParameters
    contributes_loss: bool
    micro_batches: int  # of a step

    def run(
        self,
        rows: torch.Tensor,
        counted: torch.Tensor,
        divergence: torch.Tensor | None = None,  # noqa: ARG002 - of other objectives
    ) -> torch.Tensor:
        """See Accumulation."""
        mesh, loss_scale = self.micro.topology.mesh, self.micro.loss_scale
        (batch,) = self.micro.batches(rows, len(rows))
        phases.enter("pipeline")
        share = self.micro.upscaled(mesh.averaged / counted[0])
        total = self.pipeline.forward_backward(batch.tokens, batch.targets, batch.segments, share)[None]
        phases.enter("communication")
        if self.tied is not None:
            self.tied.add_up(self.parameters.named())
        dist.all_reduce(total.mul_(self.contributes_loss))
        total = total / mesh.averaged
        return total if loss_scale is None else total / loss_scale.scale

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size * self.micro_batches


@dataclass(frozen=True)
class ElasticReplicas:
    """Whole replicas under elastic determinism: every sum over the batch has the order of the grid's tree."""

    micro: Micro
    sums: GradientSums
    grid: StepGrid
    rank: int

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """See Accumulation."""
        grid = self.grid()
        self.sums.begin_step(grid)
        losses = torch.zeros(grid.grains, len(counted), device=counted.device)
        share = self.micro.upscaled(1 / counted)
        for grain, batch in zip(grid.share(self.rank), self.micro.batches(rows), strict=True):
            losses[grain] = self.micro.compute(batch, share, divergence)
            self.sums.take()
        phases.enter("communication")
        total = over_grains(losses, grid)
        self.sums.give()
        return total / counted

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size * len(self.grid().share(self.rank))


@dataclass(frozen=True)
class ElasticShards:
    """Shards under elastic determinism: each round ends in FSDP2's reduce-scatter, which is `TreeReduceScatter`.

    A rank without a grain in the last round computes one that is not added.
    """

    micro: Micro
    balance: Balance
    grid: StepGrid
    rank: int
    clear_gradients: Callable[[], None]

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """See Accumulation."""
        grid = self.grid()
        losses = torch.zeros(grid.rounds * grid.ranks, len(counted), device=counted.device)
        share = self.micro.upscaled(1 / counted)
        batches = list(self.micro.batches(rows))
        for number in range(grid.rounds):
            self.clear_gradients()  # only the last round leaves gradients
            spare = number >= len(batches)
            with self.balance.uncounted() if spare else nullcontext():
                batch = batches[0 if spare else number]
                losses[number * grid.ranks + self.rank] = self.micro.compute(batch, share, divergence)
        phases.enter("communication")
        return over_grains(losses, grid) / counted

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size * len(self.grid().round_robin(self.rank))
