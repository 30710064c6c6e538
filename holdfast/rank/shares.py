"""Micro-batches dealt by measured speed, under `determinism: elastic`: a faster rank computes more of them.

The tree of the sums does not depend on the rank that computes a micro-batch. So the speeds change no bit, they are no
state, and each launch measures them again.
"""

import logging
import time

import torch

from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.engines.grid import Grid

log = logging.getLogger("holdfast.train")

TRIES = 5  # the fastest counts
PRODUCTS = 4  # per try
ALIKE = 1.1  # ranks up to this many times slower than the fastest one count as equally fast


def deal_by_speed(spec: Assignment, device: torch.device, gang: Gang) -> Assignment:
    """The assignment with the speeds of the ranks, if the spec deals by speed. A collective call."""
    grid = spec.grid(gang.size)
    if spec.parallel.deal != "measured" or grid is None or gang.size == 1:
        return spec
    seconds = gang.all_gather(probe_seconds(spec, device), float)
    fastest = min(seconds)
    speeds = tuple(1.0 if own <= ALIKE * fastest else fastest / own for own in seconds)
    dealt = spec.model_copy(update={"speeds": speeds})
    if gang.rank == 0:
        log.info("%s", describe(grid, dealt.grid(gang.size) or grid, seconds))
    return dealt


def probe_seconds(spec: Assignment, device: torch.device) -> float:
    """The seconds that this rank's device takes for products of the size of a feed-forward layer on a micro-batch."""
    rows = spec.training.micro_batch * spec.model.context
    dtype = torch.float32 if spec.training.precision == "fp32" else torch.bfloat16
    left = torch.ones(rows, spec.model.hidden, dtype=dtype, device=device)
    right = torch.ones(spec.model.hidden, spec.model.ffn_width, dtype=dtype, device=device)
    _multiply(left, right)  # loads the kernel
    return min(_multiply(left, right) for _ in range(TRIES))


def describe(equal: Grid, dealt: Grid, seconds: list[float]) -> str:
    """A sentence on the deal: the micro-batches of each rank, and the expected time of a step."""
    shares = [len(dealt.share(rank)) for rank in range(dealt.ranks)]
    after = max(share * own for share, own in zip(shares, seconds, strict=True))
    before = max(len(equal.share(rank)) * own for rank, own in enumerate(seconds))
    return (
        f"micro-batches by measured speed: {', '.join(map(str, shares))} on ranks 0 to {dealt.ranks - 1}; a step takes "
        f"about {after / before:.0%} of the time of equal shares"
    )


def _multiply(left: torch.Tensor, right: torch.Tensor) -> float:
    """The seconds of the products."""
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        product = left @ right
    product.flatten()[-1].item()  # waits for the device
    return time.perf_counter() - start
