"""Checkpoints: a JSON manifest and packs of tensor bytes; writing the manifest is the commit.

Promises that a checkpoint is visible only when complete, that what is loaded is what was saved to the last bit or is
refused loudly, and that any layout can load what any other saved. Knows tensors and the store, not engines or models.
"""

from holdfast.components.checkpoint.attempts import Attempt, claim_attempt, list_attempts
from holdfast.components.checkpoint.box import TensorBox
from holdfast.components.checkpoint.fingerprint import StateDigest, box_digests, digest_of, scalars_digest
from holdfast.components.checkpoint.manifest import Manifest
from holdfast.components.checkpoint.reader import load_newest, newest_segments, read_manifest, read_tensor
from holdfast.components.checkpoint.retention import Retention
from holdfast.components.checkpoint.writer import Checkpointer

__all__ = [
    "Attempt",
    "Checkpointer",
    "Manifest",
    "Retention",
    "StateDigest",
    "TensorBox",
    "box_digests",
    "claim_attempt",
    "digest_of",
    "list_attempts",
    "load_newest",
    "newest_segments",
    "read_manifest",
    "read_tensor",
    "scalars_digest",
]
