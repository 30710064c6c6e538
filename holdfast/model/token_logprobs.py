"""Log-probabilities of target tokens, in chunks of tokens: no tensor of tokens x vocabulary exists.

The chunk is part of the plan, because it is part of the order of sums. A chunk never crosses a row, so the sums of a
row do not depend on the other rows. Sums over the vocabulary and the gradient of the head are fp32.
Inputs in fp64 have sums in fp64. Backward computes the logits of a chunk again.

With `compiled`, what happens to the logits between the products is one kernel, which reads them once. Without it, it is
a copy in fp32 and some passes over it, which take longer than the products on an accelerator.

With a process group, each of its ranks has consecutive rows of the head (vocabulary shards). A chunk then costs two
small reductions in forward: the maximum, and the sum of exponentials with the target's logit. It costs none in
backward, which adds the gradient of `hidden` over the ranks once.

Shape suffixes: as in `decoder`; C tokens of a chunk.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.autograd.function import once_differentiable

from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.training import LOSS_CHUNK

IGNORED = -100  # as a target: log-probability 0, no gradient
CHUNK = LOSS_CHUNK  # tokens whose logits exist at a time


def token_logprobs(
    hidden_BTD: Tensor,
    head_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunk: int = CHUNK,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
    compiled: bool = False,
) -> Tensor:
    """The log-probability of each target, fp32 [B, T]; 0 where the target is IGNORED.

    A position may have several targets: with `targets_BT` of [B, T, K], so has the result. All but the first of a
    position are distinct.

    `head_VD` is the weight of the head. With a `group` it is this rank's shard of the vocabulary, which begins at
    `first_token`. A collective call of the group, forward and backward. A group, and several targets of a position,
    are not `compiled`.
    """
    if chunk < 1:
        raise ValueError(f"the chunk of token_logprobs is {chunk}; give at least 1 token")
    if hidden_BTD.dtype != head_VD.dtype:
        raise ValueError(
            f"the input of the head is {hidden_BTD.dtype} and its weight {head_VD.dtype}; give both in one dtype"
        )
    compiled = compiled and group is None and targets_BT.dim() == 2
    logprobs_BT: Tensor = _TokenLogprobs.apply(hidden_BTD, head_VD, targets_BT, chunk, group, first_token, compiled)
    return logprobs_BT


class Likeliest(NamedTuple):
    """The likeliest tokens after each position."""

    tokens: Tensor  # [B, T, K], int64
    logprobs: Tensor  # [B, T, K], fp32


@torch.no_grad()
def likeliest_tokens(
    hidden_BTD: Tensor,
    head_VD: Tensor,
    count: int,
    chunk: int = CHUNK,
    *,
    group: dist.ProcessGroup | None = None,
    first_token: int = 0,
) -> Likeliest:
    """The `count` likeliest tokens after each position, from all of the vocabulary, and their log-probabilities. The
    remaining parameters are those of `token_logprobs`."""
    shape = (*hidden_BTD.shape[:2], count)
    tokens_BTK = torch.empty(shape, dtype=torch.int64, device=hidden_BTD.device)
    logprobs_BTK = torch.empty(shape, dtype=_precise(hidden_BTD.dtype), device=hidden_BTD.device)
    for row, tokens in _chunks(tokens_BTK, chunk):
        logits_CV = (hidden_BTD[row, tokens] @ head_VD.T).to(logprobs_BTK.dtype)
        if group is None:
            largest_CK, tokens_BTK[row, tokens] = logits_CV.topk(count, 1)
            lse_C = logits_CV.logsumexp(1)
        else:
            largest_CK, tokens_BTK[row, tokens] = _likeliest_of_shards(logits_CV, count, group, first_token)
            lse_C = largest_CK[:, 0] + _sums_over_shards(logits_CV, largest_CK[:, 0], group).log()
        logprobs_BTK[row, tokens] = largest_CK - lse_C[:, None]
    return Likeliest(tokens_BTK, logprobs_BTK)


def _likeliest_of_shards(
    logits_CV: Tensor, count: int, group: dist.ProcessGroup, first_token: int
) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of all shards and their tokens: the largest of each shard's largest. A shard may have
    fewer than `count` tokens."""
    own = min(count, logits_CV.shape[1])
    mine = logits_CV.new_full((len(logits_CV), count), -torch.inf), logits_CV.new_zeros(len(logits_CV), count).long()
    mine[0][:, :own], mine[1][:, :own] = logits_CV.topk(own, 1)
    mine[1].add_(first_token)
    logits_CS, tokens_CS = (_side_by_side(part, group) for part in mine)
    largest_CK, place_CK = logits_CS.topk(count, 1)
    return largest_CK, tokens_CS.gather(1, place_CK)


def _side_by_side(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather_single(parts.view(-1), part.reshape(-1), group=group)
    return torch.cat(parts.unbind(), 1)


def _sums_over_shards(logits_CV: Tensor, largest_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    sums_C = (logits_CV - largest_C[:, None]).exp_().sum(1)
    dist.all_reduce(sums_C, group=group)
    return sums_C


class _TokenLogprobs(torch.autograd.Function):
    """The sums of `token_logprobs`, and their gradients by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: Tensor,
        head_VD: Tensor,
        targets_BT: Tensor,
        chunk: int,
        group: dist.ProcessGroup | None,
        first_token: int,
        compiled: bool,
    ) -> Tensor:
        """Log-probabilities, chunk by chunk."""
        precise = _precise(hidden_BTD.dtype)
        logprobs_BT = torch.empty(targets_BT.shape, dtype=precise, device=hidden_BTD.device)
        lse_BT = logprobs_BT.new_empty(targets_BT.shape[:2])
        for row, tokens in _chunks(targets_BT, chunk):
            product_CV = hidden_BTD[row, tokens] @ head_VD.T
            index_C, owned_C = _local_targets(targets_BT[row, tokens], first_token, len(head_VD))
            if compiled:
                lse_C, target_C = _by_one_kernel(_lse_and_targets, product_CV, index_C)
                lse_BT[row, tokens] = lse_C
                logprobs_BT[row, tokens] = (target_C - lse_C).where(owned_C, 0)
                continue
            logits_CV = product_CV.to(precise)
            target_C = logits_CV.gather(1, index_C.view(len(index_C), -1)).view_as(index_C).where(owned_C, 0)
            if group is None:
                lse_C = logits_CV.logsumexp(1)
            else:
                largest_C = logits_CV.amax(1)
                dist.all_reduce(largest_C, dist.ReduceOp.MAX, group=group)
                sums = torch.cat((logits_CV.sub_(largest_C[:, None]).exp_().sum(1), target_C.flatten()))
                dist.all_reduce(sums, group=group)
                lse_C, target_C = largest_C + sums[: len(largest_C)].log(), sums[len(largest_C) :].view_as(target_C)
            lse_BT[row, tokens] = lse_C
            logprobs_C = target_C - lse_C.view(-1, *[1] * (target_C.dim() - 1))
            logprobs_BT[row, tokens] = logprobs_C.where(targets_BT[row, tokens] != IGNORED, 0)
        ctx.save_for_backward(hidden_BTD, head_VD, targets_BT, lse_BT)
        ctx.chunk, ctx.group, ctx.first_token, ctx.compiled = chunk, group, first_token, compiled
        return logprobs_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and the weight of the head."""
        hidden_BTD, head_VD, targets_BT, lse_BT = ctx.saved_tensors
        gradient_BT = gradients[0].where(targets_BT != IGNORED, 0)
        precise, several = lse_BT.dtype, targets_BT.shape[2] if targets_BT.dim() > 2 else 1
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        shards = ctx.group is not None
        d_hidden_BTD = torch.empty_like(hidden_BTD, dtype=precise if shards else None) if wants_hidden else None
        d_head_VD = torch.zeros_like(head_VD, dtype=precise) if wants_head else None
        for row, tokens in _chunks(targets_BT, ctx.chunk):
            x_CD, gradient_CK = hidden_BTD[row, tokens], gradient_BT[row, tokens].reshape(-1, several)
            index_C, owned_C = _local_targets(targets_BT[row, tokens], ctx.first_token, len(head_VD))
            index_CK, own_CK = index_C.view_as(gradient_CK), gradient_CK.where(owned_C.view_as(gradient_CK), 0)
            if ctx.compiled:
                operands = lse_BT[row, tokens], gradient_CK[:, 0], index_C, own_CK[:, 0]
                d_CV = _by_one_kernel(_gradient_of_logits, x_CD @ head_VD.T, *operands)
            else:
                gradient_C1 = gradient_CK.sum(1, keepdim=True)
                d_CV = (x_CD @ head_VD.T).to(precise).sub_(lse_BT[row, tokens, None]).exp_().mul_(-gradient_C1)
                d_CV.scatter_add_(1, index_CK[:, :1], own_CK[:, :1])
                if several > 1:  # apart from the first one, which may be one of them: no sum depends on an order
                    d_CV.scatter_add_(1, index_CK[:, 1:], own_CK[:, 1:])
                d_CV = d_CV.to(head_VD.dtype)
            if d_hidden_BTD is not None:
                d_hidden_BTD[row, tokens] = d_CV @ head_VD
            if d_head_VD is not None:
                if d_head_VD.dtype == x_CD.dtype:
                    d_head_VD.addmm_(d_CV.T, x_CD)
                else:
                    d_head_VD += d_CV.T @ x_CD
        if shards and d_hidden_BTD is not None:
            dist.all_reduce(d_hidden_BTD, group=ctx.group)
            d_hidden_BTD = d_hidden_BTD.to(hidden_BTD.dtype)
        return d_hidden_BTD, None if d_head_VD is None else d_head_VD.to(head_VD.dtype), *[None] * 5


def _lse_and_targets(logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials, and the logit of its target."""
    precise_CV = logits_CV.to(_precise(logits_CV.dtype))
    return precise_CV.logsumexp(1), precise_CV.gather(1, index_C[:, None])[:, 0]


def _gradient_of_logits(logits_CV: Tensor, lse_C: Tensor, gradient_C: Tensor, index_C: Tensor, own_C: Tensor) -> Tensor:
    """The gradient of the logits, in their data type: `own_C` at the target, less the share of each token times
    `gradient_C`."""
    share_CV = (logits_CV.to(lse_C.dtype) - lse_C[:, None]).exp()
    at_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == index_C[:, None]
    d_CV = share_CV * -gradient_C[:, None] + torch.where(at_target_CV, own_C[:, None], 0)
    return d_CV.to(logits_CV.dtype)


def _by_one_kernel(function: Callable[..., Any], *operands: Tensor) -> Any:
    """The function, compiled for each length of a chunk. With more lengths than torch compiles, it would use separate
    operations for the rest, with other bits and without an error. Raises SpecError instead."""
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return _compiled(function)(*operands)
    except FailOnRecompileLimitHit:
        limit = torch._dynamo.config.recompile_limit
        message = f"makes chunks of more than {limit} lengths, and with training.compile torch compiles no more"
        remedy = "use a chunk that divides the lengths of all rows, or training.compile: false"
        raise SpecError([Problem("training.loss_chunk", None, message, remedy)]) from None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(targets_BT: Tensor, chunk: int) -> Iterator[tuple[int, slice]]:
    """The chunks of each row, in their order."""
    rows, length = targets_BT.shape[:2]
    for row in range(rows):
        for start in range(0, length, chunk):
            yield row, slice(start, min(start + chunk, length))


def _local_targets(targets_C: Tensor, first_token: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The targets as rows of this shard, and which of them it has. The other targets are row 0."""
    index_C = targets_C - first_token
    owned_C = (index_C >= 0) & (index_C < vocabulary) & (targets_C != IGNORED)
    return index_C.where(owned_C, 0), owned_C
