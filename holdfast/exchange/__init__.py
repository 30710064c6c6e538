"""Checkpoints to and from other systems: Hugging Face, torch's distributed checkpoints, DeepSpeed's universal ones.

Both directions use bounded memory. Nothing imported is executed: pickles of those formats are parsed into plain
records, and no class is looked up. The code for torch's distributed checkpoints is imported on demand: it takes a
second, and the train step only writes a Hugging Face model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.exchange.hugging_face import HuggingFace, export_hugging_face
from holdfast.exchange.import_checkpoint import ImportedCheckpoint, Source, UniversalCheckpoint, import_checkpoint

if TYPE_CHECKING:
    from holdfast.exchange.dcp import DistributedCheckpoint, export_dcp, upload_dcp
    from holdfast.exchange.universal import export_universal

__all__ = [
    "DistributedCheckpoint",
    "HuggingFace",
    "ImportedCheckpoint",
    "Source",
    "UniversalCheckpoint",
    "export_dcp",
    "export_hugging_face",
    "export_universal",
    "import_checkpoint",
    "upload_dcp",
]


def __getattr__(name: str) -> Any:
    if name == "export_universal":
        return getattr(import_module(f"{__name__}.universal"), name)
    if name not in ("DistributedCheckpoint", "export_dcp", "upload_dcp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.dcp"), name)
