"""The comparison of a sweep: one table of its trials, and the best of them. `docs/sweeps.md` explains it."""

from holdfast.components.compare.step import compare

__all__ = ["compare"]
