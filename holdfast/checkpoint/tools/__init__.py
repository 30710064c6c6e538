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
from holdfast.checkpoint.tools.listing import CheckpointInfo, list_checkpoints, retention_of
from holdfast.checkpoint.tools.parting import Parting, Side, parting
from holdfast.checkpoint.tools.verify import Damage, Verified, verify

__all__ = [
    "CheckpointInfo",
    "Collected",
    "Damage",
    "Difference",
    "Parting",
    "ScalarDifference",
    "Side",
    "TensorDifference",
    "Verified",
    "collect_now",
    "differences",
    "equal",
    "list_checkpoints",
    "parting",
    "retention_of",
    "verify",
]
