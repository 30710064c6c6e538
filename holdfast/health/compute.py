"""Probes of a device: matrix products, their bits, and memory bandwidth.

Every probe repeats until its seconds are over, at least once after a warm-up. The best repetition counts: other load on
the machine makes a probe slower, never faster. Nothing here uses torch's generators.
"""

import hashlib
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from holdfast.collectives import Gang
from holdfast.health.verdict import Link

clock = time.perf_counter  # seconds; of every probe

_SEED = 20_240_229
_EXACT, _BITS = 256, 512  # sides of square matrices
_SIDE = {"cpu": 512}
_OTHER_SIDE = 8192
_BYTES = {"cpu": 64 << 20}  # larger than the caches of a core
_OTHER_BYTES = 1 << 30


def best_rate(work: Callable[[], object], amount: float, seconds: float, settle: Callable[[], object]) -> float:
    """`amount` per second of the fastest repetition of `work`, after which `settle` waits for the device. Repeats for
    `seconds`."""
    work()
    settle()
    first, best = clock(), 0.0
    while True:
        start = clock()
        work()
        settle()
        end = clock()
        best = max(best, amount / max(end - start, 1e-9))
        if end - first >= seconds:
            return best


def settle_on(device: torch.device) -> Callable[[], object]:
    """A function that waits until the device has finished its work."""
    if device.type == "cpu":
        return lambda: None
    synchronize: Callable[[], object] = getattr(torch, device.type).synchronize
    return synchronize


def compute_rate(device: torch.device, seconds: float) -> float:
    """FLOP/s of products of large matrices: in bf16 on an accelerator, in fp32 on a CPU."""
    side = _SIDE.get(device.type, _OTHER_SIDE)
    a, b = (_uniform((side, side), stream).to(device, working_type(device)) for stream in (1, 2))
    out = torch.empty_like(a)
    return best_rate(lambda: torch.mm(a, b, out=out), 2.0 * side**3, seconds, settle_on(device))


def memory_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    size = _BYTES.get(device.type, _OTHER_BYTES)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return best_rate(lambda: target.copy_(source), 2.0 * size, seconds, settle_on(device))


def exact_product_is_right(device: torch.device) -> bool:
    """Whether an exact product is correct. Its integers are so small that no sum is rounded, in fp32, TF32 or any other
    type that the device uses. So one rank can test this alone."""
    generator = np.random.Generator(np.random.Philox(_SEED))
    a, b = (generator.integers(-8, 9, (_EXACT, _EXACT)) for _ in range(2))
    expected = a @ b
    a_there, b_there = (torch.from_numpy(matrix.astype(np.float32)).to(device) for matrix in (a, b))
    return bool(np.array_equal((a_there @ b_there).cpu().numpy().astype(np.float64), expected))


def product_bits(device: torch.device) -> str:
    """The digest of a rounded product of fixed matrices: equal on equal hardware with equal libraries."""
    a, b = (_uniform((_BITS, _BITS), stream).to(device, working_type(device)) for stream in (3, 4))
    product = (a @ b).float().cpu().contiguous()
    return hashlib.blake2b(product.numpy().tobytes(), digest_size=16).hexdigest()


def working_type(device: torch.device) -> torch.dtype:
    """The data type of a probe's computation."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _uniform(shape: tuple[int, int], stream: int) -> torch.Tensor:
    """Numbers in [-1, 1), the same everywhere."""
    generator = np.random.Generator(np.random.Philox(key=_SEED + stream))
    # In torch's own memory, equally aligned on every rank: libraries require that for equal bits.
    return torch.from_numpy(generator.random(shape, dtype=np.float32) * 2 - 1).clone()


# Probes of the connections between ranks: each pair separately, and all ranks in a ring.
#
# Collective calls. Up to 16 ranks, every pair is measured. Above that, only pairs whose numbers differ in one bit, so
# the number of rounds is logarithmic in the ranks. A rank has at most one partner in a round, so no pair waits for
# another.

ALL_PAIRS = 16  # ranks
REPETITIONS = 3
_LINK_BYTES = {"cpu": 4 << 20}
_OTHER_LINK_BYTES = 64 << 20


def distances(ranks: int) -> list[int]:
    """The rounds: in each, rank and rank XOR distance are partners."""
    reach = 1
    while reach < ranks:
        reach *= 2
    if ranks <= ALL_PAIRS:
        return list(range(1, reach))
    return [1 << bit for bit in range(reach.bit_length() - 1)]


def pair_links(gang: Gang, device: torch.device) -> tuple[Link, ...]:
    """Every measured pair, the same on all ranks. The rate of the slower end counts: one of them may have waited."""
    own: dict[int, float] = {}
    sent, received = _buffers(device)
    for distance in distances(gang.size):
        partner = gang.rank ^ distance
        if partner < gang.size:
            own[partner] = _exchange(sent, partner, received, partner, device)
    rates_by_rank = gang.all_gather(own, dict[int, float])
    return tuple(
        Link(first=first, second=second, rate=min(rate, rates_by_rank[second][first]))
        for first, rates in enumerate(rates_by_rank)
        for second, rate in sorted(rates.items())
        if first < second
    )


def ring_rate(gang: Gang, device: torch.device) -> float:
    """Bytes per second of the slowest rank while each sends to the next one and receives from the one before."""
    sent, received = _buffers(device)
    successor, predecessor = (gang.rank + 1) % gang.size, (gang.rank - 1) % gang.size
    return min(gang.all_gather(_exchange(sent, successor, received, predecessor, device), float))


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    sent = torch.ones(_LINK_BYTES.get(device.type, _OTHER_LINK_BYTES) // 4, device=device)
    return sent, torch.empty_like(sent)


def _exchange(sent: torch.Tensor, target: int, received: torch.Tensor, source: int, device: torch.device) -> float:
    """Bytes per second of the best repetition, after one that synchronizes the two ends."""
    settle, best = settle_on(device), 0.0
    for repetition in range(1 + REPETITIONS):
        start = clock()
        operations = [dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        settle()
        seconds = clock() - start
        if repetition:
            best = max(best, sent.numel() * sent.element_size() / max(seconds, 1e-9))
    return best
