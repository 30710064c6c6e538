"""What a dataset of conversations says of a token beside its id: whether it counts in the loss, and whether a document
ends with it.

Marks are bits above the id, in the shards and in the rows of a batch, so that whatever orders, reads and caches tokens
knows nothing of them. Tokens of plain text have none: all of them count, and documents end with a token of their own.
"""

import numpy as np
from numpy.typing import NDArray

UNCOUNTED = 1 << 31  # read, but not counted as a target
ENDS = 1 << 30  # the last token of its document
ID = ENDS - 1  # the bits of the id itself
NO_TOKEN = -1  # in the place of the token that ends documents, where marks do


def only_chosen(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of pairs, in which of the answers only those count that were chosen: every other document, the first one
    included."""
    ends = (rows[:, :-1] & ENDS) != 0
    rejected = (np.cumsum(ends, axis=1) - ends) % 2 == 1
    marked = rows.copy()
    marked[:, 1:][rejected] |= UNCOUNTED
    return marked
