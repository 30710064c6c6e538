"""Ranks with deliberate faults: clocks that advance only when read, and a flipped bit.

So slowness does not depend on the machine: a slow rank's clock advances a hundred times as far per read.
"""

import os

import torch

from holdfast.health import compute, program

SOUND, SLOW = 0.01, 1.0  # seconds per read
_product = torch.Tensor.__matmul__


def by_looks(seconds: float) -> None:
    """From now on, each read of the probes' clock returns this many seconds more than the one before."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    compute.clock = clock


def flip(wrong: bool) -> None:
    """From now on, every product has one wrong bit, or none."""

    def product(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result = _product(self, other)
        result.view(torch.int32)[3, 5] ^= 1
        return result

    torch.Tensor.__matmul__ = product if wrong else _product  # type: ignore[method-assign,assignment]


def main() -> None:
    """See `program.main`. HOLDFAST_TEST_SICK gives a rank and its fault: "1:slow" or "1:wrong"."""
    rank, _, defect = os.environ["HOLDFAST_TEST_SICK"].partition(":")
    is_sick = os.environ["RANK"] == rank
    by_looks(SLOW if is_sick and defect == "slow" else SOUND)
    flip(is_sick and defect == "wrong")
    program.main()
