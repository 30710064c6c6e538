"""Pipeline parallelism: the decoder's layers are divided into stages, and micro-batches pass through them.

Schedules are torch's (`torch.distributed.pipelining`): GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019),
interleaved 1F1B (Narayanan et al. 2021), and the zero-bubble schedule with the memory of 1F1B (ZB-H1, Qi et al. 2024).
ZB-H1 splits a backward pass in two: gradients of inputs, which the stage before waits for, and gradients of weights,
which no stage waits for.

The schedule fixes the order in which a stage adds its micro-batches' gradients. The last stage computes the loss, so no
logits leave it. A layer's own stage charges the loss that balances its experts.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case, as in the decoder
from __future__ import annotations

from collections.abc import Sequence
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
)

from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder
from holdfast.planning.schedule import split
from holdfast.spec.model import Model

if TYPE_CHECKING:
    from torch.distributed.pipelining._utils import _TensorMeta

STAGES_EACH = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # stages per rank
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
    costs[-1] += model.hidden * vocabulary
    return split(costs, stages)


def given_layers(stages: Sequence[int]) -> list[range]:
    """The layers of each stage, from the number of layers of each stage."""
    ends = list(accumulate(stages))
    return [range(end - own, end) for own, end in zip(stages, ends, strict=True)]


class Stage(Decoder):
    """Some layers of a decoder, under their names in the whole model. The first stage also has the embedding, and the
    last one has the final norm, the head and the loss. A tied head is the embedding's matrix, which both stages hold.
    """

    def __init__(self, shape: Model, vocabulary: int, layers: range) -> None:
        super().__init__(shape, vocabulary)
        self.first, self.last = layers.start == 0, layers.stop == shape.layers
        for index in range(shape.layers):
            if index not in layers:
                self.model.layers.register_module(str(index), None)
        if not self.first and not (self.last and shape.tie_embeddings):
            self.model.register_module("embed_tokens", None)
        if not self.last:
            self.model.register_module("norm", None)
            self.lm_head = None

    def forward(  # type: ignore[override]
        self, x: Tensor, targets_BT: Tensor, share_B: Tensor, segments: Segments | None = None
    ) -> Tensor:
        """From token ids [B, T] in the first stage, else the residual stream, to the residual stream. The last stage
        returns the sum of the losses. `share_B` scales the gradient of a sequence's charge as it scales that of its
        loss."""
        x_BTD = self.embed(x) if self.first else x
        x_BTD, unevenness_B = self.through(x_BTD, 0, self.shape.context, segments)
        charge_B = self.charge(unevenness_B, targets_BT)
        if charge_B is not None:
            x_BTD = _Charged.apply(x_BTD, (charge_B * share_B).sum())
        if not self.last:
            return x_BTD
        return self.loss(self.model.norm(x_BTD), targets_BT, "sum")


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


class _Charged(torch.autograd.Function):
    """The residual stream, unchanged. The gradient of the charge is always 1."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, charge: Tensor) -> Tensor:
        """Return the same numbers."""
        ctx.one = torch.ones_like(charge)
        return x_BTD.clone()  # FSDP2 does not accept a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the stream and of the charge."""
        return gradients[0], ctx.one


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
        ranks, place = group.size(), group.rank()
        count = ranks * len(stages)
        built = [_Stage(stage, place + ranks * index, count, device, group=group) for index, stage in enumerate(stages)]
        settings: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": _share, "scale_grads": False}
        self._schedule: Any
        if schedule in _SEVERAL:  # takes any number of stages, also one
            self._schedule = _SEVERAL[schedule](list(built), **settings)
        else:
            self._schedule = _ONE[schedule](built[0], **settings)
        self._first, self._last = place == 0, place == ranks - 1

    def forward_backward(self, tokens: Tensor, targets: Tensor, segments: Segments, share: Tensor) -> Tensor:
        """Forward and backward pass of all micro-batches of a step. The gradient is that of the losses' sum times
        `share`. Returns that product, or 0 on ranks without the last stage."""
        losses: list[Tensor] = []
        self._schedule.step(
            *((tokens,) if self._first else ()),
            target=targets if self._last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"share": share},
            targets_BT=targets,
            share_B=share.expand(len(targets)),
            document_BT=segments.documents(len(targets)),
        )
        total = torch.zeros((), device=tokens.device)
        for loss in losses:
            total += loss.detach().float()
        return total


def _share(loss: Tensor, _targets: Tensor, share: Tensor) -> Tensor:
    return loss * share
