"""Checkpoints: a JSON root, one index per writer, and packs of tensor bytes. Writing the root is the commit.

A checkpoint is visible only when it is complete. A load returns exactly the bits that were saved, or fails with an
error. Any layout can load what any other layout saved. The package knows tensors and the store, not engines or models.
Its modules are imported lazily: pins and attempts need no torch, and some images have none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.attempts import Attempt, claim_attempt, list_attempts
    from holdfast.checkpoint.box import TensorBox
    from holdfast.checkpoint.fingerprint import StateDigest, box_digests, digest_of, scalars_digest
    from holdfast.checkpoint.load import load_newest, newest_segments
    from holdfast.checkpoint.manifest import Manifest
    from holdfast.checkpoint.reader import Checkpoint, open_checkpoint, read_manifest
    from holdfast.checkpoint.retention import Pin, Retention, list_pins, pin, unpin
    from holdfast.checkpoint.writer import Checkpointer, SaveOptions

__all__ = [
    "Attempt",
    "Checkpoint",
    "Checkpointer",
    "Manifest",
    "Pin",
    "Retention",
    "SaveOptions",
    "StateDigest",
    "TensorBox",
    "box_digests",
    "claim_attempt",
    "digest_of",
    "list_attempts",
    "list_pins",
    "load_newest",
    "newest_segments",
    "open_checkpoint",
    "pin",
    "read_manifest",
    "scalars_digest",
    "unpin",
]

_PARTS = {
    "attempts": ("Attempt", "claim_attempt", "list_attempts"),
    "box": ("TensorBox",),
    "fingerprint": ("StateDigest", "box_digests", "digest_of", "scalars_digest"),
    "load": ("load_newest", "newest_segments"),
    "manifest": ("Manifest",),
    "retention": ("Pin", "Retention", "list_pins", "pin", "unpin"),
    "reader": ("Checkpoint", "open_checkpoint", "read_manifest"),
    "writer": ("Checkpointer", "SaveOptions"),
}
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PART_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PART_OF[name]}"), name)
