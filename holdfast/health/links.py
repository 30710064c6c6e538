"""Probes of the connections between ranks: each pair separately, and all ranks in a ring.

Collective calls. Up to 16 ranks, every pair is measured. Above that, only pairs whose numbers differ in one bit, so the
number of rounds is logarithmic in the ranks. A rank has at most one partner in a round, so no pair waits for another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from holdfast.collectives import Gang
from holdfast.health import compute
from holdfast.health.compute import settle_on
from holdfast.health.measured import Link

ALL_PAIRS = 16  # ranks
REPETITIONS = 3
_BYTES = {"cpu": 4 << 20}
_OTHER_BYTES = 64 << 20


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
    mine: dict[int, float] = {}
    sent, received = _buffers(device)
    for distance in distances(gang.size):
        partner = gang.rank ^ distance
        if partner < gang.size:
            mine[partner] = _exchange(sent, partner, received, partner, device)
    told = gang.all_gather(mine, dict[int, float])
    return tuple(
        Link(first=first, second=second, rate=min(rate, told[second][first]))
        for first, rates in enumerate(told)
        for second, rate in sorted(rates.items())
        if first < second
    )


def ring_rate(gang: Gang, device: torch.device) -> float:
    """Bytes per second of the slowest rank while each sends to the next one and receives from the one before."""
    sent, received = _buffers(device)
    after, before = (gang.rank + 1) % gang.size, (gang.rank - 1) % gang.size
    return min(gang.all_gather(_exchange(sent, after, received, before, device), float))


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    sent = torch.ones(_BYTES.get(device.type, _OTHER_BYTES) // 4, device=device)
    return sent, torch.empty_like(sent)


def _exchange(sent: torch.Tensor, target: int, received: torch.Tensor, source: int, device: torch.device) -> float:
    """Bytes per second of the best repetition, after one that synchronizes the two ends."""
    settle, best = settle_on(device), 0.0
    for repetition in range(1 + REPETITIONS):
        begun = compute.clock()
        both = [dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        settle()
        took = compute.clock() - begun
        if repetition:
            best = max(best, sent.numel() * sent.element_size() / max(took, 1e-9))
    return best
