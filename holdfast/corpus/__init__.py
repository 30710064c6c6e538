"""Sources of text: `identify` says what they are, and `prepare` makes the dataset of packed tokens out of them.

A part, because not only the preprocess step asks: what a retraining would learn from is known before any step runs.
"""

from holdfast.corpus.identity import identify
from holdfast.corpus.prepare import Divided, Prepared, Tokenised, divide, prepare, tokenise

__all__ = ["Divided", "Prepared", "Tokenised", "divide", "identify", "prepare", "tokenise"]
