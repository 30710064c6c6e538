"""Compare step of a sweep: one table of its trials, and the best one. See `docs/sweeps.md`."""

from holdfast.components.compare.step import compare

__all__ = ["compare"]
