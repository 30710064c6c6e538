"""One micro-batch on this rank: what the models compute from it, and its loss and gradient.

With context parallelism a rank has a part of every row. The losses of tokens are added up over the ranks. An objective
that adds up documents gets the losses of all positions on each rank, in the order of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.engines.torch.context import SequenceShard
from holdfast.engines.torch.parallelize import Topology
from holdfast.engines.torch.scaling import LossScale
from holdfast.model.decoder import Decoder
from holdfast.model.lora import without_adapters
from holdfast.model.token_logprobs import IGNORED, Likeliest
from holdfast.objectives.interface import MicroBatch, Objective, ObjectiveInputs, micro_batches, weighted
from holdfast.telemetry import phases


@contextmanager
def frozen_pass(model: nn.Module) -> Iterator[None]:
    """Inside the context, a model computes without gradients and adapters, and its routers count no tokens."""
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    training = [decoder.training for decoder in decoders]
    for decoder in decoders:  # not its layers, which a compiler would compile again
        decoder.training = False
    with torch.no_grad(), without_adapters(model):
        yield
    for decoder, before in zip(decoders, training, strict=True):
        decoder.training = before


@dataclass(frozen=True)
class ReferenceModel:
    """The frozen model that an objective compares with: other weights, or the trained model without its adapters."""

    module: nn.Module

    def __call__(self, batch: MicroBatch) -> Tensor:
        """The losses of the targets: [B, T]."""
        with frozen_pass(self.module):
            losses: Tensor = self.module(batch.tokens, batch.targets, batch.segments, reduction="none")
        return losses


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
    teacher: nn.Module | None = None  # the frozen model whose likeliest tokens are learned

    def batches(self, rows: Tensor, size: int | None = None) -> Iterator[MicroBatch]:
        """What the objective gets of some rows, which are on the CPU."""
        batches = micro_batches(rows, size or self.settings.size, self.settings.end_of_text, self.topology.device)
        return batches if self._by_document else map(self._part, batches)

    def seen(self, batch: MicroBatch) -> MicroBatch:
        """What the models of this rank get of a micro-batch of `batches`."""
        return self._part(batch) if self._by_document else batch

    def whole(self, losses: Tensor) -> Tensor:
        """What the objective gets of the losses of this rank's positions."""
        shard = self.settings.sequence
        return losses if shard is None or not self._by_document else shard.whole(losses)

    def upscaled(self, share: Tensor) -> Tensor:
        """Multiply `share` by the loss scale in fp16."""
        return share if self.loss_scale is None else share * self.loss_scale.scale

    def given(self, batch: MicroBatch, divergence: Tensor | None = None) -> ObjectiveInputs:
        """What the objective needs of a micro-batch, in the arithmetic of the forward pass."""
        narrow, seen = self.settings.narrow, self.seen(batch)
        with torch.autocast(self.topology.device.type, narrow, enabled=narrow is not None):
            reference = None if self.reference is None else self.whole(self.reference(seen))
            if "logits" in self.objective.needs:
                logits = self.policy(seen.tokens, None, seen.segments)
                return ObjectiveInputs(logits.new_empty(0), reference, divergence, logits=logits)
            targets, teacher = seen.targets, None
            if self.teacher is not None:
                with torch.no_grad():
                    teacher = Likeliest(*self.teacher(seen.tokens, None, seen.segments))
                targets = with_theirs(targets, teacher)
            losses = self.whole(self.policy(seen.tokens, targets, seen.segments, reduction="none"))
        return ObjectiveInputs(losses, reference, divergence, teacher)

    def compute(self, batch: MicroBatch, share: Tensor, divergence: Tensor | None = None) -> Tensor:
        """Forward and backward pass. The gradient is that of the weighted sum of the terms times `share`. Returns the
        sums of the terms."""
        phases.enter("forward")
        sums = self.objective.sums(self.given(batch, divergence), batch)
        phases.enter("backward")
        weighted(self.objective, sums * share).backward()
        return sums.detach()

    @property
    def _by_document(self) -> bool:
        return "documents" in self.objective.needs

    def _part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part of every row. The documents are those of whole rows."""
        shard = self.settings.sequence
        if shard is None:
            return batch
        tokens, targets, marks = map(shard.of_each, (batch.tokens, batch.targets, batch.marks))
        return batch._replace(tokens=tokens, targets=targets, marks=marks)


def with_theirs(targets: Tensor, teacher: Likeliest) -> Tensor:
    """The targets [B, T] and the teacher's tokens, where a target counts: [B, T, 1 + K]."""
    return torch.cat((targets[..., None], teacher.tokens.where(targets[..., None] != IGNORED, IGNORED)), -1)
