"""Gradient compression between whole replicas (DDP): communication hooks, mostly torch's.

- `fp16` and `bf16` halve the bytes sent and keep no state.
- `powersgd` (Vogels et al. 2019) sends two thin matrices instead of one, and adds what it left out to the next step's
  gradient. This error differs between ranks and is part of the state. The step is the key of its random projections.
  Buckets are reduced one after another, because two concurrent chains of collectives may start in different orders on
  different ranks.
- `topk` (Stich et al. 2018; Lin et al. 2018) sends the largest elements of each gradient with their positions. The
  remaining elements are its error.
"""

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

from holdfast.engines.weights import LEFT_OUT
from holdfast.spec.training import Training

NO_DIVISION_BY_ZERO = 1e-8  # for zero gradients, as in the warm-up


class Kept(Protocol):
    """A hook that keeps the parts of gradients that it did not send."""

    def begin_step(self) -> None:
        """Begin a step. The caller has just seeded torch's generator."""

    def forget(self) -> None:
        """Drop all state before each pass of the warm-up. DDP rebuilds its buckets after the first pass."""

    def settle(self) -> None:
        """Start with zero errors: the buckets are now final."""

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's error of each parameter: name and live tensor, [1, *shape]."""


class PowerSGD:
    """The PowerSGD hook and its errors. See `Kept`."""

    def __init__(self, module: DistributedDataParallel, rank: int) -> None:
        """`rank` is the number of columns of the thin matrices."""
        self._names = {id(parameter): name for name, parameter in module.module.named_parameters()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.module.named_parameters()}
        self._places: dict[int, list[tuple[str, int]]] = {}  # by bucket: its parameters, and where each begins
        self._state = PowerSGDState(
            None,
            rank,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=NO_DIVISION_BY_ZERO,
            compression_stats_logging_frequency=2**62,
        )
        self._state.iter = self._state.start_powerSGD_iter
        # A lambda, because DDP checks annotations, and ours are strings.
        module.register_comm_hook(self._state, lambda state, bucket: self._reduce(state, bucket))  # noqa: PLW0108

    def begin_step(self) -> None:
        """See `Kept`. The seed of the step determines the projections."""
        self._state.rng = np.random.RandomState(torch.initial_seed() % 2**32)
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()

    def forget(self) -> None:
        """See `Kept`. No state of former buckets remains."""
        for state in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict, self._places):
            state.clear()

    def settle(self) -> None:
        """See `Kept`."""
        for error in self._state.error_dict.values():
            error.zero_()

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Kept`. The tensors are views of the buckets' errors."""
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
    """A hook that sends the largest elements of each gradient, with its errors. See `Kept`.

    Elements are chosen per tensor, so buckets do not affect the choice. Every rank adds the received values in rank
    order, so all ranks have the same bits.
    """

    def __init__(self, module: DistributedDataParallel, fraction: float) -> None:
        """`fraction` of the elements of each tensor is sent, and at least one element."""
        self._fraction = fraction
        trained = [(name, weights) for name, weights in module.module.named_parameters() if weights.requires_grad]
        self._names = {id(parameter): name for name, parameter in trained}
        self._errors = {name: torch.zeros_like(parameter) for name, parameter in trained}
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def begin_step(self) -> None:
        """See `Kept`. Nothing is random."""

    def forget(self) -> None:
        """See `Kept`. Nothing depends on buckets."""

    def settle(self) -> None:
        """See `Kept`."""
        for error in self._errors.values():
            error.zero_()

    def errors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Kept`. One error per parameter."""
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
        for positions, kept_values in zip(all_places.long(), all_values, strict=True):
            flat[positions] += kept_values  # each position once
        reduced: torch.futures.Future[Any] = torch.futures.Future()
        reduced.set_result(flat)
        return reduced


def largest(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` elements of a vector with the largest magnitudes, in ascending order. Of equal elements,
    the first ones are taken. NaN counts as infinite."""
    sizes = x.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count).values.min()
    above, equal = sizes > least, sizes == least
    return (above | (equal & (equal.cumsum(0) <= count - above.sum()))).nonzero().view(-1)


def _of_all(own: Tensor, ranks: int) -> Tensor:
    """Gather a vector of equal length from each rank: [ranks, elements]."""
    gathered = own.new_empty(ranks, len(own))
    dist.all_gather_single(gathered.view(-1), own)
    return gathered


def compress(module: nn.Module, training: Training) -> Kept | None:
    """Register the spec's compression on `module`, if it is a DDP replica. Returns the hook if it keeps state."""
    if not isinstance(module, DistributedDataParallel):
        return None
    match training.gradient_compression:
        case "fp16":
            module.register_comm_hook(None, fp16_compress_hook)
        case "bf16":
            # DDP refuses the hook by its name without NCCL or XCCL, although gloo can add in bf16.
            module.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))  # noqa: PLW0108
        case "powersgd":
            return PowerSGD(module, training.powersgd_rank)
        case "topk":
            return TopK(module, training.topk_fraction)
        case "none":
            pass
    return None
