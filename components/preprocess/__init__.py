"""The preprocess step: sources to a dataset of packed tokens. `run` prepares it, `identify` only names it."""

from holdfast.components.preprocess.step import Prepared, identify, run

__all__ = ["Prepared", "identify", "run"]
