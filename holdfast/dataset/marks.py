"""Marks of tokens in a dataset of conversations: whether a token counts in the loss, and whether it ends a document.

Marks are bits above the id, in the shards and in the rows of a batch. So code that orders, reads and caches tokens does
not depend on them. Tokens of plain text have no marks: all of them count, and a separate token ends each document.
"""

import numpy as np
from numpy.typing import NDArray

UNCOUNTED = 1 << 31  # read, but not counted as a target
ENDS = 1 << 30  # the last token of its document
ID = ENDS - 1  # the bits of the id itself
NO_TOKEN = -1  # in place of the end-of-text token if marks end documents


def only_chosen(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of pairs in which only the chosen answers count: every other document, starting with the first."""
    ends = (rows[:, :-1] & ENDS) != 0
    rejected = (np.cumsum(ends, axis=1) - ends) % 2 == 1
    marked = rows.copy()
    marked[:, 1:][rejected] |= UNCOUNTED
    return marked
