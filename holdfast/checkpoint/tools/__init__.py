"""What a person asks of checkpoints: which there are and why, whether they are whole, where two differ, what may go.

All in bounded memory, beside a run that goes on. Only a collection changes anything.
"""

from holdfast.checkpoint.tools.collection import Collected, collect_now
from holdfast.checkpoint.tools.difference import (
    Difference,
    ScalarDifference,
    TensorDifference,
    differences,
    equal,
)
from holdfast.checkpoint.tools.first_divergence import Divergence, Side, find_divergence
from holdfast.checkpoint.tools.listing import CheckpointInfo, list_checkpoints, retention_of
from holdfast.checkpoint.tools.verify import Damage, Verified, verify

__all__ = [
    "CheckpointInfo",
    "Collected",
    "Damage",
    "Difference",
    "Divergence",
    "ScalarDifference",
    "Side",
    "TensorDifference",
    "Verified",
    "collect_now",
    "differences",
    "equal",
    "find_divergence",
    "list_checkpoints",
    "retention_of",
    "verify",
]
