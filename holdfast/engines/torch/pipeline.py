"""Pipeline parallelism: the decoder's layers are divided into stages, and micro-batches pass through them.

Schedules are torch's (`torch.distributed.pipelining`): GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019),
interleaved 1F1B (Narayanan et al. 2021), and the zero-bubble schedule with the memory of 1F1B (ZB-H1, Qi et al. 2024).
ZB-H1 splits a backward pass in two: gradients of inputs, which the stage before waits for, and gradients of weights,
which no stage waits for.

The schedule fixes the order in which a stage adds its micro-batches' gradients. The last stage computes the losses of
the tokens, so no logits leave it. A layer's own stage charges the loss that balances its experts.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case, as in the decoder
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from holdfast.engines.mesh import STAGES_EACH, Mesh
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Charged, Decoder
from holdfast.objectives.interface import MicroBatch
from holdfast.planning.schedule import split
from holdfast.spec.model import Model
from holdfast.spec.parallel import Parallel

if TYPE_CHECKING:
    from torch.distributed.pipelining._utils import _TensorMeta

_SEVERAL: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
_ONE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def split_layers(model: Model, vocabulary: int, stages: int) -> list[range]:
    """The layers of each stage, with the lowest cost of the most expensive stage. The cost of a layer and of the head
    is its multiplications per token (see `flops_per_token`). An embedding lookup costs nothing."""
    width = model.head_width * (2 * model.heads + 2 * model.key_value_heads)
    met = min(model.routing.top_k, model.experts) + model.routing.shared  # experts that a token passes through
    costs = []
    for layer in model.layer_shapes():
        wide = met * model.ffn_width if layer.mixture else model.dense_width
        seen = min(layer.window or model.context, model.context) if model.preset.pattern else model.context
        costs.append(model.hidden * (width + 3 * wide) + 2 * seen * model.heads * model.head_width)
    costs[-1] += model.hidden * (vocabulary if model.head == "tokens" else 1)
    return split(costs, stages)


def build_parts(model: Model, vocabulary: int, parallel: Parallel, mesh: Mesh, rank: int) -> list[Decoder]:
    """The decoder, or this rank's stages of it, with unfilled weights. `parallel.stages` applies if it fits."""
    if mesh.pipeline == 1:
        return [Decoder(model, vocabulary)]
    count, chosen = mesh.pipeline * STAGES_EACH[parallel.schedule], parallel.stages
    fits = chosen is not None and sum(chosen) == model.layers  # a teacher may have another number of layers
    stages = given_layers(chosen or ()) if fits else split_layers(model, vocabulary, count)
    return [Stage(model, vocabulary, layers) for layers in stages[mesh.place(rank) :: mesh.pipeline]]


def given_layers(stages: Sequence[int]) -> list[range]:
    """The layers of each stage, from the number of layers of each stage."""
    ends = list(accumulate(stages))
    return [range(end - own, end) for own, end in zip(stages, ends, strict=True)]


class Stage(Decoder):
    """Some layers of a decoder, under their names in the whole model. The first stage also has the embedding, and the
    last one has the final norm, the head and the losses. A tied head is the embedding's matrix, which both stages hold.
    """

    def __init__(self, shape: Model, vocabulary: int, layers: range) -> None:
        super().__init__(shape, vocabulary)
        self.first, self.last = layers.start == 0, layers.stop == shape.layers
        for index in range(shape.layers):
            if index not in layers:
                self.model.layers.register_module(str(index), None)
        if not self.first and not (self.last and shape.tie_embeddings and self.score is None):
            self.model.register_module("embed_tokens", None)
        if not self.last:
            self.model.register_module("norm", None)
            self.lm_head = self.score = None

    def forward(  # type: ignore[override]
        self, x: Tensor, targets_BT: Tensor, share_B: Tensor | None = None, segments: Segments | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """From token ids [B, T] in the first stage, else the residual stream, to the residual stream. The last stage
        returns what `Decoder` returns for each token. `share_B` scales the gradient of a sequence's charge as it scales
        that of its loss."""
        x_BTD = self.embed(x) if self.first else x
        x_BTD, unevenness_B = self.through(x_BTD, 0, self.shape.context, segments)
        charge_B = self.charge(unevenness_B, targets_BT)
        if charge_B is not None and share_B is not None:
            x_BTD = Charged.apply(x_BTD, (charge_B * share_B).sum())
        if not self.last:
            return x_BTD
        x_BTD = self.model.norm(x_BTD)
        if self.score is not None:
            return self.rewards(x_BTD)
        return (
            self.loss(x_BTD, targets_BT, "none")
            if self.top is None
            else tuple(self.likeliest(self._tempered(x_BTD), self.top))
        )


class _Stage(PipelineStage):
    """torch's stage, with JSON instead of a pickle for the description of tensors sent to a neighbor.

    A schedule divides tensors among micro-batches. Segments therefore arrive as the numbers of documents, on the CPU.
    """

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro-batch."""
        return super().forward_maybe_with_nosync(*args, **_with_segments(kwargs))

    def _compute_outputs(self, *args: Any, **kwargs: Any) -> Any:
        return super()._compute_outputs(*args, **_with_segments(kwargs))

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        field = _meta_fields()[type(meta)]
        super()._send_meta([field, [_describe_tensor(tensor) for tensor in getattr(meta, field)]], dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        field, tensors = super()._recv_meta(src_stage)
        kind = next(kind for kind, name in _meta_fields().items() if name == field)
        return kind(tuple(_parse_tensor(tensor) for tensor in tensors))


def _with_segments(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in arguments.items() if name != "document_BT"}
    return {**rest, "segments": Segments.of_documents(arguments["document_BT"])}


@lru_cache
def _meta_fields() -> dict[type, str]:
    """The field with the tensors of each description. Imported here: older torch, without a pipeline, lacks them."""
    from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta

    return {_StageForwardMeta: "forward_metas", _StageBackwardMeta: "backward_metas"}


def _describe_tensor(meta: _TensorMeta | None) -> list[Any] | None:
    if meta is None:
        return None
    from torch.distributed.pipelining._utils import _TensorMeta

    if type(meta) is not _TensorMeta:
        raise TypeError(f"a stage sends a {type(meta).__name__}; between stages there are plain tensors only")
    return [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch."), meta.requires_grad]


def _parse_tensor(described: list[Any] | None) -> _TensorMeta | None:
    if described is None:
        return None
    from torch.distributed.pipelining._utils import _TensorMeta

    shape, stride, name, requires_grad = described
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"another stage sends tensors of the unknown type {name!r}")
    return _TensorMeta(torch.Size(shape), tuple(stride), dtype, bool(requires_grad))


class ForwardPipeline:
    """The forward pass of the stages of this rank, without gradients."""

    def __init__(
        self, stages: Sequence[torch.nn.Module], group: dist.ProcessGroup, micro_batches: int, device: torch.device
    ) -> None:
        """See `Pipeline`."""
        self._stages = _stages_of(stages, group, device)
        self._schedule: Any
        if len(stages) > 1:
            self._schedule = ScheduleLoopedBFS(list(self._stages), micro_batches)
        else:
            self._schedule = ScheduleGPipe(self._stages[0], micro_batches)
        self._first = group.rank() == 0

    def __call__(self, batch: MicroBatch) -> Any:
        """What the last stage returns for the rows of a step, in their order. None on ranks without the last stage."""
        with torch.no_grad():
            tokens = (batch.tokens,) if self._first else ()
            outputs = self._schedule.step(*tokens, **_rows_of(batch))
        for stage in self._stages:
            stage.clear_runtime_states()  # the outputs of all micro-batches
        return outputs


LossOfRows = Callable[[Tensor, slice], Tensor]  # the terms of some rows of a step, from the output of the last stage


class Pipeline:
    """The stages of this rank, in one pipeline with the stages of the other ranks of `group`."""

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        group: dist.ProcessGroup,
        schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"],
        micro_batches: int,
        device: torch.device,
    ) -> None:
        """`stages` are the stage at this rank's position in `group`, then the stages `group.size()` positions further
        each."""
        built = _stages_of(stages, group, device)
        settings: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": self._loss, "scale_grads": False}
        self._schedule: Any
        if schedule in _SEVERAL:  # takes any number of stages, also one
            self._schedule = _SEVERAL[schedule](list(built), **settings)
        else:
            self._schedule = _ONE[schedule](built[0], **settings)
        self._first, self._last = group.rank() == 0, group.rank() == group.size() - 1
        self._terms: LossOfRows
        self._values: dict[int, Tensor] = {}  # of the terms, by the first row of each micro-batch

    def forward_backward(self, batch: MicroBatch, terms: LossOfRows, share: Tensor, weights: Tensor) -> Tensor:
        """Forward and backward pass of all micro-batches of a step. The gradient is that of the sum of `terms`, times
        `share` and `weights`; the latter may be of the first terms only. Returns the sums of the terms times `share`,
        or 0 on ranks without the last stage."""
        self._terms = terms
        self._values.clear()
        self._schedule.step(
            *((batch.tokens,) if self._first else ()),
            target=torch.arange(len(batch.targets)) if self._last else None,
            return_outputs=False,
            loss_kwargs={"share": share, "weights": weights},
            share_B=share[0].expand(len(batch.targets)),
            **_rows_of(batch),
        )
        total = torch.zeros_like(share)
        for _, values in sorted(self._values.items()):
            total += values
        return total

    def _loss(self, output: Tensor, rows: Tensor, share: Tensor, weights: Tensor) -> Tensor:
        """The loss of a micro-batch. torch also calls it before the first step, to see what it returns."""
        first = int(rows[0])
        values = self._terms(output, slice(first, first + len(rows))) * share
        self._values[first] = values.detach().float()
        return (values[: len(weights)] * weights).sum()


def _stages_of(
    stages: Sequence[torch.nn.Module], group: dist.ProcessGroup, device: torch.device
) -> Sequence[PipelineStage]:
    ranks, place = group.size(), group.rank()
    count = ranks * len(stages)
    return [_Stage(stage, place + ranks * index, count, device, group=group) for index, stage in enumerate(stages)]


def _rows_of(batch: MicroBatch) -> dict[str, Tensor]:
    """What each stage gets of the rows, in tensors that a schedule divides."""
    return {"targets_BT": batch.targets, "document_BT": batch.segments.documents(len(batch.targets))}
