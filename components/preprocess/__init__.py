"""The preprocess step: the sources of a spec become its dataset of packed tokens in the store."""

from holdfast.components.corpus import Prepared
from holdfast.components.corpus import prepare as run

__all__ = ["Prepared", "run"]
