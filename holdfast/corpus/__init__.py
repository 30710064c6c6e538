"""Sources of text: `identify` computes their dataset id, and `prepare` makes the dataset of packed tokens.

It is a separate part because the trigger needs it before any other step runs, to know what a retraining would learn
from.
"""

from holdfast.corpus.identity import identify
from holdfast.corpus.prepare import Divided, Prepared, Tokenised, divide, prepare, tokenise

__all__ = ["Divided", "Prepared", "Tokenised", "divide", "identify", "prepare", "tokenise"]
