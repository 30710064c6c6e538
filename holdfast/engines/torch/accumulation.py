"""Gradient accumulation: forward and backward pass of all micro-batches of a step, one class for each kind of layout.

`micro.Micro` is what all of them share: one micro-batch on this rank. The classes differ in what happens between
micro-batches and between ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.engines.grid import Grid
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch.balance import Balance
from holdfast.engines.torch.elastic import GradientSums, over_grains
from holdfast.engines.torch.micro import Micro, frozen_pass, with_theirs
from holdfast.engines.torch.parameters import TrainedParameters
from holdfast.engines.torch.pipeline import ForwardPipeline, Pipeline
from holdfast.engines.torch.tied import TiedEnds
from holdfast.model.token_logprobs import Likeliest
from holdfast.objectives.interface import MicroBatch, ObjectiveInputs, weights_of
from holdfast.objectives.unpaired import divergence_sums
from holdfast.telemetry import phases


class Accumulation(Protocol):
    """Computes the gradient of a step."""

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """Accumulate the gradient of the loss of the global batch, of which `rows` are this rank's, on the CPU.
        `counted` are the divisors of the objective's terms. Returns the values of the terms. `divergence`: see
        `ObjectiveInputs`. A collective call."""

    def divergence_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """The `divergence_sums` of this rank's rows, without gradients. Ranks that share rows return the same sums,
        or 0."""

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """The losses of all targets of this rank's rows, without gradients: fp32 [rows, context] on the CPU. A
        collective call."""

    def warm_up_rows(self) -> int:
        """The number of rows for a pass that uses all that a step uses."""


class StepGrid:
    """The grid of the current step under elastic determinism. A growing batch has more grains in later steps."""

    def __init__(self, grid: Grid) -> None:
        self.now = grid

    def __call__(self) -> Grid:
        """The grid."""
        return self.now


def _divergence_sums(micro: Micro, rows: torch.Tensor, rounds: int | None = None) -> torch.Tensor:
    """See `Accumulation.divergence_sums`. With shards every rank computes `rounds` micro-batches."""
    batches = list(micro.batches(rows))
    sums = torch.zeros(2, dtype=torch.int64, device=micro.topology.device)
    for number in range(rounds or len(batches)):
        batch = batches[min(number, len(batches) - 1)]
        sums += divergence_sums(micro.given(batch), batch) * (number < len(batches))
    return sums


def _losses(micro: Micro, rows: torch.Tensor, rounds: int | None = None) -> torch.Tensor:
    """See `Accumulation.losses`. With shards every rank computes `rounds` micro-batches."""
    batches, losses = list(micro.batches(rows)), []
    for number in range(rounds or len(batches)):
        batch = batches[min(number, len(batches) - 1)]
        losses.append(micro.given(batch).losses.float().cpu())
    return torch.cat(losses[: len(batches)])


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

    def divergence_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _divergence_sums(self.micro, rows)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _losses(self.micro, rows)

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
class Stages:
    """The pipelines of a rank: the trained stages, their forward pass, and that of the frozen models."""

    trained: Pipeline
    forward: ForwardPipeline
    parts: nn.ModuleList  # the trained stages
    reference: ForwardPipeline | None  # None with adapters, and for objectives without a reference
    teacher: ForwardPipeline | None
    group: dist.ProcessGroup  # of the ranks of a pipeline


@dataclass(frozen=True)
class PipelineStages:
    """Pipeline stages: every rank has the rows of its data-parallel group, and the last stage has the losses. Frozen
    models have the same layout, and compute the rows of a step before its first backward pass."""

    micro: Micro
    stages: Stages
    tied: TiedEnds | None
    parameters: TrainedParameters
    contributes_loss: bool
    micro_batches: int  # of a step

    def run(self, rows: torch.Tensor, counted: torch.Tensor, divergence: torch.Tensor | None = None) -> torch.Tensor:
        """See Accumulation."""
        micro, objective = self.micro, self.micro.objective
        mesh, loss_scale = micro.topology.mesh, micro.loss_scale
        (batch,) = micro.batches(rows, len(rows))
        phases.enter("pipeline")
        seen = micro.seen(batch)
        reference, teacher = self._reference(seen), None
        if self.stages.teacher is not None and (likeliest := self.stages.teacher(seen)) is not None:
            teacher = Likeliest(*likeliest)
            seen = seen._replace(targets=with_theirs(seen.targets, teacher))

        def terms(losses: torch.Tensor, some: slice) -> torch.Tensor:
            theirs = None if teacher is None else Likeliest(*(part[some] for part in teacher))
            frozen = None if reference is None else reference[some]
            return objective.sums(ObjectiveInputs(micro.whole(losses), frozen, divergence, theirs), batch.some(some))

        share = micro.upscaled(mesh.averaged / counted)
        total = self.stages.trained.forward_backward(seen, terms, share, weights_of(objective, share))
        phases.enter("communication")
        if self.tied is not None:
            self.tied.add_up(self.parameters.named())
        dist.all_reduce(total.mul_(self.contributes_loss))
        total = total / mesh.averaged
        return total if loss_scale is None else total / loss_scale.scale

    def divergence_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        (batch,) = self.micro.batches(rows, len(rows))
        seen = self.micro.seen(batch)
        reference, losses = self._reference(seen), self.stages.forward(seen)
        if reference is None:
            return torch.zeros(2, dtype=torch.int64, device=self.micro.topology.device)
        return divergence_sums(ObjectiveInputs(self.micro.whole(losses), reference), batch)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation. The ranks with the last stage send them to all ranks of the pipeline."""
        (batch,) = self.micro.batches(rows, len(rows))
        found = self.stages.forward(self.micro.seen(batch))
        if found is None:
            losses = torch.zeros(batch.targets.shape, device=self.micro.topology.device)
        else:
            losses = self.micro.whole(found).float().contiguous()
        dist.all_reduce(losses.view(torch.int32), group=self.stages.group)  # adds 0 to the bits
        return losses.cpu()

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size * self.micro_batches

    def _reference(self, seen: MicroBatch) -> torch.Tensor | None:
        """The reference losses of the rows of a step, on ranks with the last stage."""
        if "reference" not in self.micro.objective.needs:
            return None
        with frozen_pass(self.stages.parts):
            losses = (self.stages.reference or self.stages.forward)(seen)
        return None if losses is None else self.micro.whole(losses)


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

    def divergence_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _divergence_sums(self.micro, rows)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _losses(self.micro, rows)

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

    def divergence_sums(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _divergence_sums(self.micro, rows, self.grid().rounds)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """See Accumulation."""
        return _losses(self.micro, rows, self.grid().rounds)

    def warm_up_rows(self) -> int:
        """See Accumulation."""
        return self.micro.settings.size * len(self.grid().round_robin(self.rank))
