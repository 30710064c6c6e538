"""Tools for a person: list checkpoints and why they are kept, verify them, compare two, and collect garbage.

All work in bounded memory, also while the run trains. Only a collection changes anything.
"""

from holdfast.checkpoint.tools.collection import Collected, collect_now
from holdfast.checkpoint.tools.difference import (
    Difference,
    Divergence,
    ScalarDifference,
    Side,
    TensorDifference,
    differences,
    equal,
    find_divergence,
)
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
