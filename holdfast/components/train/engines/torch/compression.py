"""Gradients that whole replicas (DDP) send to each other in fewer bits: communication hooks, mostly torch's own.

`fp16` and `bf16` halve what is sent and keep nothing between steps. `powersgd` (Vogels et al. 2019) sends two thin
matrices instead of one, and adds what it left out to the next step's gradient: that error is each rank's own, and part
of the state. Its random projections are keyed by the step. Buckets are reduced one after another there, because a
chain of collectives for each of two buckets may come to other ranks in another order. `topk` (Stich et al. 2018; Lin
et al. 2018) sends the largest elements of each gradient with their places, and keeps the others as that error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from holdfast.components.train.weights import LEFT_OUT
from holdfast.spec.training import Training

NO_DIVISION_BY_ZERO = 1e-8  # where a gradient is zero, as in the warm-up


class Kept(Protocol):
    """A hook that keeps what it leaves out of gradients."""

    def begin_step(self) -> None:
        """A step begins, for which torch's generator has just been seeded."""

    def forget(self) -> None:
        """Before each pass of the warm-up: DDP makes its buckets anew after the first one."""

    def settle(self) -> None:
        """The buckets are those of all steps to come, and nothing was left out yet."""

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank has left out of the gradient of each parameter: the living tensors, [1, *shape]."""


class PowerSGD:
    """The hook, and the errors that it keeps. See `Kept`."""

    def __init__(self, module: DistributedDataParallel, rank: int) -> None:
        """`rank`: columns of the thin matrices."""
        self._names = {id(parameter): name for name, parameter in module.module.named_parameters()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.module.named_parameters()}
        self._places: dict[int, list[tuple[str, int]]] = {}  # of a bucket: its parameters, and where each begins
        self._state = PowerSGDState(
            None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=NO_DIVISION_BY_ZERO,
            compression_stats_logging_frequency=2**62,
        )  # fmt: skip
        self._state.iter = self._state.start_powerSGD_iter
        # A lambda, because DDP looks at annotations, and ours are text.
        module.register_comm_hook(self._state, lambda state, bucket: self._reduce(state, bucket))  # noqa: PLW0108

    def begin_step(self) -> None:
        """Its projections follow from the seed of the step."""
        self._state.rng = np.random.RandomState(torch.initial_seed() % 2**32)
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()

    def forget(self) -> None:
        """Nothing of former buckets goes on."""
        for kept in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict, self._places):
            kept.clear()

    def settle(self) -> None:
        """Errors begin at zero."""
        for error in self._state.error_dict.values():
            error.zero_()

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """Parts of the buckets'."""
        for bucket, places in sorted(self._places.items()):
            for name, start in places:
                shape = self._shapes[name]
                flat = self._state.error_dict[bucket][start : start + math.prod(shape)]
                yield LEFT_OUT + name, flat.view(1, *shape)

    def _reduce(self, state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        first = int(bucket.buffer().storage_offset())
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        places = [(self._names[id(parameter)], int(grad.storage_offset()) - first) for parameter, grad in pairs]
        self._places[bucket.index()] = places
        reduced: torch.futures.Future[Any] = torch.futures.Future()
        reduced.set_result(powerSGD_hook(state, bucket).wait())
        return reduced


class TopK:
    """The hook that sends the largest elements of each gradient, and the errors that it keeps. See `Kept`.

    Each tensor has its own choice, so buckets do not show in it. Every rank adds up what all have sent in the order of
    the ranks: all have the same bits.
    """

    def __init__(self, module: DistributedDataParallel, fraction: float) -> None:
        """`fraction`: of the elements of each tensor, at least one of them."""
        self._fraction = fraction
        held = [(name, each) for name, each in module.module.named_parameters() if each.requires_grad]
        self._names = {id(parameter): name for name, parameter in held}
        self._errors = {name: torch.zeros_like(parameter) for name, parameter in held}
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def begin_step(self) -> None:
        """Nothing is random."""

    def forget(self) -> None:
        """Nothing depends on buckets."""

    def settle(self) -> None:
        """Errors begin at zero."""
        for error in self._errors.values():
            error.zero_()

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """One of each parameter."""
        return ((LEFT_OUT + name, error[None]) for name, error in self._errors.items())

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat, ranks = bucket.buffer(), dist.get_world_size()
        first, places, values = int(flat.storage_offset()), [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            error = self._errors[self._names[id(parameter)]].view(-1)
            error.add_(gradient.view(-1), alpha=1 / ranks)
            chosen = largest(error, math.ceil(self._fraction * error.numel()))
            values.append(error[chosen])
            places.append(chosen + (int(gradient.storage_offset()) - first))
            error[chosen] = 0.0
        short = torch.int32 if flat.numel() < 2**31 else torch.int64
        all_places, all_values = _of_all(torch.cat(places).to(short), ranks), _of_all(torch.cat(values), ranks)
        flat.zero_()
        for where, what in zip(all_places.long(), all_values, strict=True):
            flat[where] += what  # each place once
        reduced: torch.futures.Future[Any] = torch.futures.Future()
        reduced.set_result(flat)
        return reduced


def largest(x: Tensor, count: int) -> Tensor:
    """The places of the `count` elements of a vector with the largest magnitudes, in their order; of equal ones those
    that come first. What is no number counts as infinite."""
    sizes = x.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count).values.min()
    above, equal = sizes > least, sizes == least
    return (above | (equal & (equal.cumsum(0) <= count - above.sum()))).nonzero().view(-1)


def _of_all(own: Tensor, ranks: int) -> Tensor:
    """A vector of each rank, all of one length: [ranks, elements]."""
    gathered = own.new_empty(ranks, len(own))
    dist.all_gather_single(gathered.view(-1), own)
    return gathered


def compress(module: nn.Module, training: Training) -> Kept | None:
    """Have `module` send its gradients as the spec says, if it is a replica among others. What keeps a state."""
    if not isinstance(module, DistributedDataParallel):
        return None
    match training.gradient_compression:
        case "fp16":
            module.register_comm_hook(None, fp16_compress_hook)
        case "bf16":
            # DDP refuses the hook by its name without NCCL or XCCL, and gloo adds in bf16 as well.
            module.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108
        case "powersgd":
            return PowerSGD(module, training.powersgd_rank)
        case "topk":
            return TopK(module, training.topk_fraction)
        case "none":
            pass
    return None
