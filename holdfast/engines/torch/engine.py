"""The torch engine: one process, DDP or FSDP2, with torch's AdamW or LAMB.

Master weights and moments are fp32 at every precision. The order of sums is fixed for a fixed layout. What differs
between layouts is in `accumulation`, `clipping` and `parallelize`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import UPDATES, Judge, Scalars, StepOutput
from holdfast.engines.layout import TensorLayout, local, share_out
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch import fp8
from holdfast.engines.torch.accumulation import (
    Accumulation,
    DataParallel,
    ElasticReplicas,
    ElasticShards,
    PipelineStages,
    Stages,
    StepGrid,
)
from holdfast.engines.torch.averaging import AveragedWeights
from holdfast.engines.torch.balance import Balance
from holdfast.engines.torch.clipping import clip, clip_in_order, clip_over_mesh
from holdfast.engines.torch.compression import compress
from holdfast.engines.torch.context import SequenceShard
from holdfast.engines.torch.elastic import GradientSums
from holdfast.engines.torch.frozen import FrozenModels, base_boxes
from holdfast.engines.torch.micro import Micro, MicroSettings, ReferenceModel
from holdfast.engines.torch.optimizers import optimizer_of, set_rate, update
from holdfast.engines.torch.parallelize import NARROW, Topology, build_expert_mesh, device_mesh, parallelize
from holdfast.engines.torch.parameters import TrainedParameters, freeze
from holdfast.engines.torch.pipeline import ForwardPipeline, Pipeline, build_parts
from holdfast.engines.torch.scaling import LossScale
from holdfast.engines.torch.tied import TiedEnds
from holdfast.engines.torch.whole_model import whole_model
from holdfast.engines.weights import COUNTER, state_prefix
from holdfast.launch.device import local_device
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import AVERAGE
from holdfast.model.lora import FrozenExperts, FrozenLinear, add_adapters
from holdfast.objectives.interface import Objective, count_terms, metrics_of, weighted
from holdfast.objectives.next_token import NextToken
from holdfast.objectives.table import build_objective
from holdfast.objectives.unpaired import divergence_of, mismatched
from holdfast.telemetry import phases


class TorchEngine:
    """See `Engine`."""

    def __init__(self, spec: Assignment, vocabulary: int, end_of_text: int, objective: Objective | None = None) -> None:
        self._spec = spec
        self._device = local_device(spec.accelerator)
        if spec.training.precision == "fp8":
            fp8.require_fp8(self._device)
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        grid = spec.grid(self._world)
        self._grid = StepGrid(grid) if grid else None
        self._mesh = Mesh.of(spec.parallel, self._world)
        self._micro_batches = spec.training.global_batch // (spec.training.micro_batch * self._mesh.data)
        self._offloaded = spec.parallel.offload != "none"
        several = self._world > 1 or self._grid is not None or self._offloaded
        fsdp = spec.parallel.strategy == "fsdp" and several
        # FSDP2 also averages tensor-parallel parts, stages and experts over whole replicas.
        self._sharded = fsdp or self._mesh.tensor * self._mesh.pipeline * self._mesh.expert > 1
        self._objective = objective or build_objective(spec.objective, spec.training)
        by_document = "documents" in self._objective.needs  # then each rank of a context group has the whole sum
        self._contributes_loss = (self._mesh.counts if by_document else self._mesh.speaks)(self._rank)
        self._loss_scale = None
        if spec.training.precision == "fp16":
            self._loss_scale = LossScale(spec.training.loss_scale, self._device)

        ranks = device_mesh(self._mesh, self._device) if self._sharded else None
        expert_mesh = build_expert_mesh(self._mesh, self._device, spec.model.experts)
        self._topology = Topology(self._mesh, self._device, ranks, expert_mesh)
        sequence = SequenceShard.of(self._mesh, self._rank, spec.model.context, self._device)
        with torch.device("meta"):
            self._parts = build_parts(spec.model, vocabulary, spec.parallel, self._mesh, self._rank)
            for part in self._parts:
                part.loss_chunk, part.temperature = spec.training.loss_chunk, spec.training.distillation.temperature
                part.compiled = spec.training.compile
                add_adapters(part, spec.training.lora)
                freeze(part, spec.training.optimizer.groups)
        computing = [
            parallelize(part, spec.training, spec.parallel, self._topology, grid=self._grid, sequence_shard=sequence)
            for part in self._parts
        ]
        self._compression = compress(computing[0], spec.training)
        self._frozen = FrozenModels(spec, vocabulary, self._objective, self._topology, sequence, self._rank)
        stages = None
        if ranks is not None and self._mesh.pipeline > 1:
            stages = self._pipelines(computing, ranks["pipeline"].get_group())
        tied = TiedEnds.of(self._mesh, self._rank, spec.model.tie_embeddings and spec.model.head == "tokens")
        self._tied = tied
        self._trained = TrainedParameters(self._parts, self._rank, self._world, tied)
        self._optimizer = optimizer_of(
            self._trained.named(),
            spec.training.optimizer,
            anywhere=self._sharded and self._grid is not None,
            rows=dict(self._trained.rows()) if self._sharded else None,
            experts=spec.model.experts,
        )
        decay = spec.training.ema.decay
        self._average = None if decay is None else AveragedWeights(self._trained.named(), decay)
        self._micro = self._micro_of(computing[0], sequence, end_of_text if spec.document_masks else None)
        self._balance = Balance(self._parts, spec.model.routing)
        self._accumulation = self._accumulation_of(self._micro, stages)
        self._warm_up(vocabulary)
        self._balance.forget()
        if isinstance(computing[0], DistributedDataParallel):
            self._mark_comm_phase()

    @property
    def layout(self) -> dict[str, Any]:
        """See Engine."""
        several = {
            name: size for name, size in self._mesh.spread.items() if size > 1 and self._mesh.shards < self._world
        }
        if self._mesh.expert > 1:
            several["expert"] = self._mesh.expert
        if self._mesh.context > 1:
            several["context"] = self._mesh.context
        return {"engine": "torch", "strategy": self._spec.parallel.strategy, "world_size": self._world} | several

    def step(
        self,
        rows: torch.Tensor,
        learning_rate: float,
        before_update: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
        size: int | None = None,
    ) -> StepOutput:
        """See Engine."""
        if self._grid is not None and (grid := self._spec.grid(self._world, size)):
            self._grid.now = grid
        if self._compression is not None:
            before_update()  # it holds state that the backward pass changes
            phases.enter("forward")
            self._compression.begin_step()
        values = self._forward_backward(rows, size or self._spec.training.global_batch)
        loss = weighted(self._objective, values)
        phases.enter("optimizer")
        norm, held = self._norm_and_held(loss, judge)
        set_rate(self._optimizer, learning_rate)
        before_update()
        update(self._optimizer, held)
        if self._average is not None:
            self._average.update(held)
        self._optimizer.zero_grad(set_to_none=True)
        self._balance.step(held)
        return StepOutput(loss, norm, held, metrics_of(self._objective, values))

    def boxes(self) -> list[TensorBox]:
        """See Engine. The boxes are views of the live weights and moments."""
        return [box for _, box in self._state()]

    def frozen(self) -> Iterator[TensorBox]:
        """See Engine."""
        adapted = self._parts if self._spec.training.lora.rank is not None else []
        return chain(base_boxes(adapted), self._frozen.boxes())

    def restored(self, step: int, scalars: Scalars = MappingProxyType({})) -> None:
        """See Engine."""
        updates = scalars.get(UPDATES, step)
        if self._loss_scale is not None:
            self._loss_scale.restored(scalars)
        for state in self._optimizer.state.values():
            if COUNTER in state:
                state[COUNTER].fill_(float(updates))

    def scalars(self, step: int) -> dict[str, float | int]:
        """See Engine."""
        state: dict[str, Any] = next(iter(self._optimizer.state.values()), {})
        updates: dict[str, float | int] = {UPDATES: int(state.get(COUNTER, step))}  # an own optimizer may not count
        return updates if self._loss_scale is None else updates | self._loss_scale.scalars()

    def saved(self) -> Sequence[TensorBox]:
        """See Engine."""
        return share_out(self._state())

    @contextmanager
    def generating(self) -> Iterator[Decoder]:
        """See Engine. Where a rank has a part of the model, or computes a part of each sequence, this is a copy."""
        decoder = self._parts[0]
        if self._sharded or self._mesh.context > 1:
            decoder = whole_model(self._spec, decoder.vocabulary, self._weights(), self._device)
        narrow, training = NARROW.get(self._spec.training.precision), decoder.training
        with torch.no_grad(), torch.autocast(self._device.type, narrow, enabled=narrow is not None):
            yield decoder.eval()
        decoder.train(training)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """See Engine."""
        with torch.no_grad(), self._balance.uncounted():
            losses = self._accumulation.losses(rows)
        for module in chain.from_iterable(part.modules() for part in self._parts):
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass leaves some weights gathered
        return losses

    def close(self) -> None:
        """See Engine. The torch engine has nothing to remove."""

    def replicas(self) -> Mapping[Hashable, Sequence[TensorBox]]:
        """See Engine."""
        replicas: dict[Hashable, list[TensorBox]] = {}
        for layout, box in self._state():
            if layout.copies > 1:
                is_tied = self._tied is not None and self._tied.has(layout.name)
                place = None if is_tied else self._mesh.place(self._rank)
                replicas.setdefault((place, layout.copied), []).append(box)
        return replicas

    def _pipelines(self, computing: Sequence[nn.Module], group: dist.ProcessGroup) -> Stages:
        """The pipelines of this rank's stages. A collective call of all ranks."""
        count, device = self._micro_batches, self._device

        def forward(parts: Sequence[nn.Module]) -> ForwardPipeline:
            return ForwardPipeline(parts, group, count, device)

        return Stages(
            trained=Pipeline(computing, group, self._spec.parallel.schedule, count, device),
            forward=forward(computing),
            parts=nn.ModuleList(self._parts),
            reference=forward(self._frozen.reference) if self._frozen.reference else None,
            teacher=forward(self._frozen.teacher) if self._frozen.teacher else None,
            group=group,
        )

    def _micro_of(self, policy: nn.Module, sequence: SequenceShard | None, end_of_text: int | None) -> Micro:
        """What computes one micro-batch."""
        training, frozen = self._spec.training, self._frozen
        narrow = None if self._sharded else NARROW.get(training.precision)  # FSDP2 casts by its own policy
        reference = None
        if "reference" in self._objective.needs:
            reference = ReferenceModel((frozen.reference or self._parts)[0])
        settings = MicroSettings(training.micro_batch, end_of_text, narrow, sequence)
        teacher = frozen.teacher[0] if frozen.teacher else None
        return Micro(policy, self._objective, reference, self._loss_scale, self._topology, settings, teacher)

    def _accumulation_of(self, micro: Micro, stages: Stages | None) -> Accumulation:
        """What accumulates gradients at this layout."""
        if self._grid is not None:
            if self._sharded and self._world > 1:
                clear = partial(self._optimizer.zero_grad, set_to_none=True)
                return ElasticShards(micro, self._balance, self._grid, self._rank, clear)
            trained = [parameter for _, parameter in self._trained.named()]
            sums = GradientSums(trained, self._rank, self._spec.parallel.bucket_mib * 2**20)
            return ElasticReplicas(micro, sums, self._grid, self._rank)
        if stages is not None:
            return PipelineStages(micro, stages, self._tied, self._trained, self._contributes_loss, self._micro_batches)
        return DataParallel(micro, self._world, self._contributes_loss)

    def _state(self) -> Iterator[tuple[TensorLayout, TensorBox]]:
        """The layout of each state tensor, and this rank's box of it."""
        for name, parameter in self._trained.named():
            layout, state = self._trained.layout_of(name, parameter), self._optimizer.state[parameter]
            yield layout, layout.box(parameter)
            for key, value in state.items():
                if key != COUNTER:
                    yield layout, layout.named(state_prefix(key)).box(value)
            if self._average is not None:
                yield layout, layout.named(AVERAGE).box(self._average[name])
        if self._spec.training.lora.rank is None:
            yield from self._layouts_and_boxes(self._trained.frozen())
        yield from self._biases()
        for name, error in self._compression.errors() if self._compression is not None else ():
            own = TensorLayout(name, (self._world, *error.shape[1:]), (self._world,), (self._rank,), (0,))
            yield own, own.box(error)

    def _weights(self) -> Iterator[tuple[TensorLayout, TensorBox]]:
        """The layout of each weight, and this rank's box of it, with the biases of routers."""
        yield from self._layouts_and_boxes(chain(self._trained.named(), self._trained.frozen()))
        yield from self._biases()

    def _layouts_and_boxes(self, named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[TensorLayout, TensorBox]]:
        for name, parameter in named:
            layout = self._trained.layout_of(name, parameter)
            yield layout, layout.box(parameter)

    def _biases(self) -> Iterator[tuple[TensorLayout, TensorBox]]:
        for name, bias in self._balance.state():
            ranks = self._world // self._mesh.pipeline  # of a stage
            layout = TensorLayout.of(name, bias).among(ranks, self._rank % ranks)
            yield layout, layout.box(bias)

    def _forward_backward(self, rows: torch.Tensor, sequences: int) -> torch.Tensor:
        """Accumulate the gradient of the loss of the global batch of `sequences` rows. Returns the values of the
        objective's terms."""
        if not isinstance(self._objective, NextToken):  # whose counted tokens weigh the charges of experts
            averaged = 1 if self._grid is not None else self._mesh.averaged
            share = torch.tensor(averaged / sequences, device=self._device)
            for part in self._parts:
                part.charge_share = self._micro.upscaled(share)
        divergence = self._divergence(rows) if "divergence" in self._objective.needs else None
        on_device = rows.to(self._device, non_blocking=True)
        count = count_terms(self._objective, on_device, self._mesh.counts(self._rank))
        return self._accumulation.run(rows, count, divergence)

    def _divergence(self, rows: torch.Tensor) -> torch.Tensor:
        """The model's divergence from the reference model on the global batch, of which `rows` are this rank's. A
        collective call."""
        phases.enter("forward")
        with torch.no_grad(), self._balance.uncounted():
            sums = self._accumulation.divergence_sums(mismatched(rows)) * self._mesh.counts(self._rank)
        if dist.is_initialized():
            dist.all_reduce(sums)
        return divergence_of(sums)

    def _norm_and_held(self, loss: torch.Tensor, judge: Judge | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip the gradients. Returns their norm before clipping, and whether the update is held back."""
        if self._loss_scale is None:
            norm = self._clip()
            return norm, judge(loss, norm) if judge is not None else None
        self._loss_scale.unscale(
            [local(parameter.grad) for _, parameter in self._trained.named() if parameter.grad is not None]
        )
        norm = self._clip()
        overflowed, mendable = self._loss_scale.overflowed(norm)
        return norm, judge(loss, norm, mendable) if judge is not None else overflowed

    def _mark_comm_phase(self) -> None:
        """Enter the communication phase when the last gradient is computed. DDP then only waits for its buckets."""
        last = next(parameter for _, parameter in self._trained.named() if parameter.requires_grad)
        last.register_hook(lambda _: phases.enter("communication"))

    def _clip(self) -> torch.Tensor:
        limit = self._spec.training.clip_norm
        if self._sharded and self._grid is not None:
            return clip_in_order(self._trained.gradients(), limit, self._grid())
        if self._sharded and (self._mesh.shards < self._world or self._mesh.expert > 1 or self._offloaded):
            return clip_over_mesh(self._trained.gradients(), limit, self._device)
        return clip((parameter for _, parameter in self._trained.named()), limit)

    def _warm_up(self, vocabulary: int) -> None:
        """Run one forward and backward pass on made-up tokens. Compile errors and lack of memory show here. DDP settles
        its buckets, so every attempt sums in the same order from its first step."""
        with torch.no_grad():
            for parameter in chain(*(part.parameters() for part in self._parts), self._frozen.parameters()):
                parameter.zero_()
            for module in chain.from_iterable(part.modules() for part in self._parts):
                if isinstance(module, FrozenLinear | FrozenExperts):
                    for _, _, scales in module.packed_matrices():
                        scales.zero_()
        batch = self._accumulation.warm_up_rows()
        rows = torch.arange(batch * (self._spec.model.context + 1)) % vocabulary
        for _ in range(2 if self._world > 1 else 1):
            if self._compression is not None:
                self._compression.forget()
            self._forward_backward(rows.view(batch, -1), batch * self._mesh.data)
            self._optimizer.zero_grad(set_to_none=True)
        if self._compression is not None:
            self._compression.settle()
