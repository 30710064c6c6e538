"""The torch engine: one process, DDP or FSDP2, with torch's AdamW or LAMB.

Master weights and moments are fp32 at every precision. The order of sums is fixed for a fixed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.grid import Grid
from holdfast.engines.interface import UPDATES, Judge, Scalars, StepOutput
from holdfast.engines.layout import TensorLayout, local, share_out
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch import fp8
from holdfast.engines.torch.balance import Balance
from holdfast.engines.torch.compression import compress
from holdfast.engines.torch.context import SequenceShard
from holdfast.engines.torch.elastic import GradientSums, over_grains, squared_norm
from holdfast.engines.torch.lamb import Rows
from holdfast.engines.torch.optimizers import optimizer_of, update
from holdfast.engines.torch.parallelize import NARROW, build_expert_mesh, device_mesh, parallelize
from holdfast.engines.torch.pipeline import STAGES_EACH, Pipeline, Stage, given_layers, split_layers
from holdfast.engines.torch.scaling import LossScale
from holdfast.engines.torch.tied import TiedEnds
from holdfast.engines.weights import MOMENTS
from holdfast.launch.device import local_device
from holdfast.model.decoder import Decoder
from holdfast.model.lora import add_adapters, without_adapters
from holdfast.objectives.next_token import counted_tokens, micro_batches
from holdfast.objectives.preference import counted_pairs, preference_loss
from holdfast.telemetry import phases


class TorchEngine:
    """See `Engine`."""

    def __init__(self, spec: Assignment, vocabulary: int, end_of_text: int) -> None:
        self._spec = spec
        self._device = local_device(spec.accelerator)
        if spec.training.precision == "fp8":
            fp8.require_fp8(self._device)
        self._end_of_text = end_of_text if spec.document_masks else None
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._grid = spec.grid(self._world)
        self._mesh = Mesh.of(spec.parallel, self._world)
        self._contributes_loss = self._mesh.speaks(self._rank)
        self._accumulation = spec.training.global_batch // (spec.training.micro_batch * self._mesh.data)
        self._offloaded = spec.parallel.offload != "none"
        several = self._world > 1 or self._grid is not None or self._offloaded
        fsdp = spec.parallel.strategy == "fsdp" and several
        # FSDP2 also averages tensor-parallel parts, stages and experts over whole replicas.
        self._sharded = fsdp or self._mesh.tensor * self._mesh.pipeline * self._mesh.expert > 1
        self._narrow = None if self._sharded else NARROW.get(spec.training.precision)  # FSDP2 casts by its own policy
        self._loss_scale = None
        if spec.training.precision == "fp16":
            self._loss_scale = LossScale(spec.training.loss_scale, self._device)

        ranks = device_mesh(self._mesh, self._device) if self._sharded else None
        expert_mesh = build_expert_mesh(self._mesh, self._device, spec.model.experts)
        self._sequence = SequenceShard.of(self._mesh, self._rank, spec.model.context, self._device)
        with torch.device("meta"):
            self._parts = self._build_parts(spec, vocabulary)
        grid = self._grid_now if self._grid else None
        computing = [
            parallelize(
                part,
                spec.training,
                spec.parallel,
                self._device,
                self._mesh,
                ranks,
                grid=grid,
                sequence_shard=self._sequence,
                expert_mesh=expert_mesh,
            )
            for part in self._parts
        ]
        self._forward, self._pipeline = computing[0], None
        self._compression = compress(self._forward, spec.training)
        self._reference = self._reference_model(spec, vocabulary, ranks, expert_mesh)
        if ranks is not None and self._mesh.pipeline > 1:
            self._pipeline = Pipeline(
                computing, ranks["pipeline"].get_group(), spec.parallel.schedule, self._accumulation, self._device
            )
        self._tied = TiedEnds.of(self._mesh, self._rank, spec.model.tie_embeddings)
        self._optimizer = optimizer_of(
            nn.ModuleList(self._parts), spec.training.optimizer, anywhere=self._sharded and bool(self._grid),
            rows=dict(self._rows()) if self._sharded else None,
        )  # fmt: skip
        self._sums = None
        if self._grid and not (self._sharded and self._world > 1):
            trained = [parameter for _, parameter in self._named()]
            self._sums = GradientSums(trained, self._rank, spec.parallel.bucket_mib * 2**20)
        self._balance = Balance(self._parts, spec.model.routing)
        self._warm_up(vocabulary)
        self._balance.forget()
        if isinstance(self._forward, DistributedDataParallel):
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
        self._grid = self._spec.grid(self._world, size)
        if self._compression is not None:
            before_update()  # it holds state that the backward pass changes
            phases.enter("forward")
            self._compression.begin_step()
        loss = self._forward_backward(rows)
        phases.enter("optimizer")
        norm, held = self._norm_and_held(loss, judge)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        before_update()
        update(self._optimizer, held)
        self._optimizer.zero_grad(set_to_none=True)
        self._balance.step(held)
        return StepOutput(loss, norm, held)

    def boxes(self) -> list[TensorBox]:
        """See Engine. The boxes are views of the live weights and moments."""
        return [box for _, box in self._state()]

    def frozen(self) -> list[TensorBox]:
        """See Engine."""
        held = chain.from_iterable(each.named_parameters() for each in (*self._parts, self._reference) if each)
        return [TensorLayout.of(name, each).box(each) for name, each in held if not each.requires_grad]

    def restored(self, step: int, scalars: Scalars = MappingProxyType({})) -> None:
        """See Engine."""
        updates = scalars.get(UPDATES, step)
        if self._loss_scale is not None:
            self._loss_scale.restored(scalars)
        for state in self._optimizer.state.values():
            state["step"].fill_(float(updates))

    def scalars(self, step: int) -> dict[str, float | int]:  # noqa: ARG002 - the optimizer has counted
        """See Engine."""
        updates: dict[str, float | int] = {UPDATES: int(next(iter(self._optimizer.state.values()))["step"])}
        return updates if self._loss_scale is None else updates | self._loss_scale.scalars()

    def saved(self) -> Sequence[TensorBox]:
        """See Engine."""
        return share_out(self._state())

    def close(self) -> None:
        """See Engine. The torch engine has nothing to remove."""

    def replicas(self) -> Mapping[Hashable, Sequence[TensorBox]]:
        """See Engine."""
        found: dict[Hashable, list[TensorBox]] = {}
        for layout, box in self._state():
            if layout.copies > 1:
                both = self._tied is not None and self._tied.has(layout.name)
                place = None if both else self._mesh.place(self._rank)
                found.setdefault((place, layout.copied), []).append(box)
        return found

    def _grid_now(self) -> Grid:
        """The grid of the current step. A growing batch has more grains in later steps."""
        assert self._grid is not None
        return self._grid

    def _build_parts(self, spec: Assignment, vocabulary: int) -> list[Decoder]:
        """The decoder, or this rank's stages of it."""
        if self._mesh.pipeline == 1:
            decoder = Decoder(spec.model, vocabulary)
            add_adapters(decoder, spec.training.lora)
            return [decoder]
        count = self._mesh.pipeline * STAGES_EACH[spec.parallel.schedule]
        given = spec.parallel.stages
        stages = split_layers(spec.model, vocabulary, count) if given is None else given_layers(given)
        return [
            Stage(spec.model, vocabulary, layers)
            for layers in stages[self._mesh.place(self._rank) :: self._mesh.pipeline]
        ]

    def _reference_model(
        self, spec: Assignment, vocabulary: int, ranks: DeviceMesh | None, expert_mesh: DeviceMesh | None
    ) -> nn.Module | None:
        """The frozen reference model for preference training: the initial weights, sharded like the model. None without
        preferences. None with adapters, because the model without its adapters is the reference."""
        if not spec.preferences or spec.training.lora.rank is not None:
            return None
        with torch.device("meta"):
            reference = Decoder(spec.model, vocabulary).requires_grad_(False)
        mesh = Mesh(replicas=1, shards=1, tensor=1) if ranks is None else self._mesh
        return parallelize(
            reference, spec.training, spec.parallel, self._device, mesh, ranks, grid=None, expert_mesh=expert_mesh
        )

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's trained parameters by canonical name."""
        held = chain.from_iterable(part.named_parameters() for part in self._parts)
        return ((name, parameter) for name, parameter in held if parameter.requires_grad)

    def _rows(self) -> Iterator[tuple[nn.Parameter, Rows]]:
        """Each trained parameter with the rows of it that this rank holds."""
        for name, parameter in self._named():
            layout = self._layout_of(name, parameter)
            yield parameter, Rows(layout.part()[0][0], layout.shape[0], layout.copy == 0)

    def _state(self) -> Iterator[tuple[TensorLayout, TensorBox]]:
        """The layout of each state tensor, and this rank's box of it."""
        for name, parameter in self._named():
            layout, state = self._layout_of(name, parameter), self._optimizer.state[parameter]
            yield layout, layout.box(parameter)
            yield from ((layout, layout.named(prefix).box(state[key])) for key, prefix in MOMENTS.items())
        for name, bias in self._balance.state():
            ranks = self._world // self._mesh.pipeline  # of a stage
            layout = TensorLayout.of(name, bias).among(ranks, self._rank % ranks)
            yield layout, layout.box(bias)
        for name, error in self._compression.errors() if self._compression is not None else ():
            own = TensorLayout(name, (self._world, *error.shape[1:]), (self._world,), (self._rank,), (0,))
            yield own, own.box(error)

    def _layout_of(self, name: str, parameter: nn.Parameter) -> TensorLayout:
        """The layout of a parameter over all ranks."""
        layout = TensorLayout.of(name, parameter)
        if not isinstance(parameter, DTensor):
            return layout.among(self._world, self._rank)
        return layout if self._tied is None else self._tied.layout_of(layout)

    def _forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over all counted tokens of the global batch. Returns that loss."""
        rows = rows.to(self._device, non_blocking=True)
        counted = (counted_pairs if self._spec.preferences else counted_tokens)(rows, self._mesh.counts(self._rank))
        if self._grid:
            by_grains = self._sharded_by_grains if self._sums is None else self._whole_by_grains
            return by_grains(rows, counted, self._grid)
        if self._pipeline is not None:
            return self._through_stages(self._pipeline, rows, counted)
        # Gradient averaging divides by the number of ranks, so multiply by it here.
        share = self._upscaled(self._mesh.averaged / counted)
        total = torch.zeros((), device=self._device)
        left = -(-len(rows) // self._spec.training.micro_batch)
        for tokens, targets, documents in self._micro_batches(rows):
            left -= 1
            with self._gradient_sync(last=left == 0):
                total += self._grain(tokens, targets, documents, share)
        if self._world > 1:
            phases.enter("communication")
            dist.all_reduce(total.mul_(self._contributes_loss))
        return total / counted

    def _norm_and_held(self, loss: torch.Tensor, judge: Judge | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip the gradients. Returns their norm before clipping, and whether the update is held back."""
        if self._loss_scale is None:
            norm = self._clip()
            return norm, judge(loss, norm) if judge is not None else None
        self._loss_scale.unscale([local(each.grad) for _, each in self._named() if each.grad is not None])
        norm = self._clip()
        overflowed, mendable = self._loss_scale.overflowed(norm)
        return norm, judge(loss, norm, mendable) if judge is not None else overflowed

    def _upscaled(self, share: torch.Tensor) -> torch.Tensor:
        """Multiply `share` by the loss scale in fp16."""
        return share if self._loss_scale is None else share * self._loss_scale.scale

    def _through_stages(self, pipeline: Pipeline, rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Like `_forward_backward`, through pipeline stages. Every rank has the rows of its data-parallel group. The
        last stage has the loss."""
        ((tokens, targets, documents),) = self._micro_batches(rows, len(rows))
        phases.enter("pipeline")
        with loss_parallel() if self._mesh.tensor > 1 else nullcontext():
            share = self._upscaled(self._mesh.averaged / counted)
            total = pipeline.forward_backward(tokens, targets, documents, share)
        phases.enter("communication")
        if self._tied is not None:
            self._tied.add_up(self._named())
        dist.all_reduce(total.mul_(self._contributes_loss))
        total = total / self._mesh.averaged
        return total if self._loss_scale is None else total / self._loss_scale.scale

    def _micro_batches(
        self, rows: torch.Tensor, size: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Inputs and targets of this rank's sequence shard, and the document ids of whole sequences."""
        of_whole = micro_batches(rows, size or self._spec.training.micro_batch, self._end_of_text)
        for tokens, targets, documents in of_whole:
            if self._sequence is None:
                yield tokens, targets, documents
            else:
                yield self._sequence.of_each(tokens), self._sequence.of_each(targets), documents

    def _whole_by_grains(self, rows: torch.Tensor, counted: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Like `_forward_backward`, with every sum over the batch in the order of the grid's tree."""
        assert self._sums is not None
        self._sums.begin_step(grid)
        losses, share = torch.zeros(grid.grains, device=self._device), self._upscaled(1 / counted)
        batches = self._micro_batches(rows)
        for grain, (tokens, targets, documents) in zip(grid.share(self._rank), batches, strict=True):
            losses[grain] = self._grain(tokens, targets, documents, share)
            self._sums.take()
        phases.enter("communication")
        total = over_grains(losses, grid)
        self._sums.give()
        return total / counted

    def _sharded_by_grains(self, rows: torch.Tensor, counted: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Like `_whole_by_grains`, for shards: each round ends in FSDP2's reduce-scatter, which is `TreeReduceScatter`.
        A rank without a grain in the last round computes one that is not added."""
        losses, share = torch.zeros(grid.rounds * grid.ranks, device=self._device), self._upscaled(1 / counted)
        batches = list(self._micro_batches(rows))
        for number in range(grid.rounds):
            self._optimizer.zero_grad(set_to_none=True)  # only the last round leaves gradients
            spare = number >= len(batches)
            tokens, targets, documents = batches[0] if spare else batches[number]
            with self._balance.uncounted() if spare else nullcontext():
                losses[number * grid.ranks + self._rank] = self._grain(tokens, targets, documents, share)
        phases.enter("communication")
        return over_grains(losses, grid) / counted

    def _grain(
        self, tokens: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None, share: torch.Tensor
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch. The gradient is that of the loss times `share`. Returns the sum
        of its losses."""
        phases.enter("forward")
        with loss_parallel() if self._mesh.tensor > 1 else nullcontext():
            with torch.autocast(self._device.type, self._narrow, enabled=self._narrow is not None):
                loss = self._loss(tokens, targets, documents)
            phases.enter("backward")
            (loss * share).backward()
        return loss.detach().float()

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """The sum of the losses of a micro-batch, over its counted tokens or its preference pairs."""
        if not self._spec.preferences:
            return local(self._forward(tokens, targets, documents, reduction="sum"))
        assert documents is not None
        judge = self._parts[0] if self._reference is None else self._reference
        with torch.no_grad(), without_adapters(judge):
            before = judge(tokens, targets, documents, reduction="none")
        losses = self._forward(tokens, targets, documents, reduction="none")
        return preference_loss(losses, before, targets, documents, self._spec.training.preference.beta)

    def _mark_comm_phase(self) -> None:
        """Enter the communication phase when the last gradient is computed. DDP then only waits for its buckets."""
        last = next(each for _, each in self._named() if each.requires_grad)
        last.register_hook(lambda _: phases.enter("communication"))

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Synchronize gradients in the last micro-batch only, where that saves communication.

        DDP holds whole gradients and reduces them over the ranks once. FSDP2 adds each micro-batch to its own gradient
        shard, so it never holds more than one layer's whole gradient. Replicas of shards are averaged once.
        """
        if isinstance(self._forward, DistributedDataParallel) and not last:
            return self._forward.no_sync()
        if isinstance(self._forward, FSDPModule) and self._mesh.replicas > 1:
            self._forward.set_requires_all_reduce(last)
        return nullcontext()

    def _clip(self) -> torch.Tensor:
        limit = self._spec.training.clip_norm
        if self._sharded and self._grid:
            return self._clip_in_order(limit, self._grid)
        if self._sharded and (self._mesh.shards < self._world or self._mesh.expert > 1 or self._offloaded):
            return self._clip_over_mesh(limit)
        norm = nn.utils.clip_grad_norm_([each for _, each in self._named()], float("inf") if limit is None else limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _clip_in_order(self, limit: float | None, grid: Grid) -> torch.Tensor:
        """Like `_clip`, for shards, with the same bits at any number of them."""
        shards = [(gradient, layout.part()[0][0], layout.shape[0]) for layout, gradient in self._gradients()]
        norm = squared_norm(shards, grid).sqrt()
        return _scaled([gradient for gradient, _, _ in shards], norm, limit)

    def _clip_over_mesh(self, limit: float | None) -> torch.Tensor:
        """Like `_clip`, for parts on several mesh dimensions.

        torch would reduce one dimension after another, each tensor separately. This is one sum, and of equal parts one
        counts. With offload, only this sum reaches the device. The device's backend cannot reduce host tensors.
        """
        held = list(self._gradients())
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in held]))
        norms *= torch.tensor([float(layout.copy == 0) for layout, _ in held], device=norms.device)
        squared = norms.square().sum().to(self._device)
        dist.all_reduce(squared)
        return _scaled([gradient for _, gradient in held], squared.sqrt(), limit)

    def _gradients(self) -> Iterator[tuple[TensorLayout, torch.Tensor]]:
        """The layout of each gradient, and this rank's part of it."""
        for name, parameter in self._named():
            assert parameter.grad is not None
            yield self._layout_of(name, parameter), local(parameter.grad)

    def _warm_up(self, vocabulary: int) -> None:
        """Run one forward and backward pass on made-up tokens. Compile errors and lack of memory show here. DDP settles
        its buckets, so every attempt sums in the same order from its first step."""
        with torch.no_grad():
            for parameter in chain.from_iterable(each.parameters() for each in (*self._parts, self._reference) if each):
                parameter.zero_()
        batch = self._spec.training.micro_batch * (
            len(self._grid.in_turn(self._rank) if self._sharded else self._grid.share(self._rank))
            if self._grid
            else self._accumulation
            if self._pipeline
            else 1
        )
        rows = torch.arange(batch * (self._spec.model.context + 1)) % vocabulary
        for _ in range(2 if self._world > 1 else 1):
            if self._compression is not None:
                self._compression.forget()
            self._forward_backward(rows.view(batch, -1))
            self._optimizer.zero_grad(set_to_none=True)
        if self._compression is not None:
            self._compression.settle()


def _scaled(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Scale the gradients down in place to the norm `limit` if their norm is above it. Returns the unscaled norm."""
    if limit is not None:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
    return norm
