"""Checkpoints to and from other systems: Hugging Face, torch's distributed checkpoints, DeepSpeed's universal ones.

Promises bounded memory both ways, and that nothing which comes in is executed: what those formats pickle is read by
readers that know a short list of harmless types.
"""

from holdfast.components.exchange.dcp import DistributedCheckpoint, export_dcp
from holdfast.components.exchange.hugging_face import HuggingFace, export_hugging_face
from holdfast.components.exchange.take_in import Source, TakenIn, take_in
from holdfast.components.exchange.universal import UniversalCheckpoint

__all__ = [
    "DistributedCheckpoint",
    "HuggingFace",
    "Source",
    "TakenIn",
    "UniversalCheckpoint",
    "export_dcp",
    "export_hugging_face",
    "take_in",
]
