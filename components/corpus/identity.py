"""The dataset id: a digest over the bytes of the sources and over the settings that decide the bytes of the dataset.

Bytes and settings, not places: the same files under another path are the same dataset. Needs no tokenising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from holdfast.components.corpus.sources import ResolvedSource, resolve
from holdfast.components.spec import Spec, digest
from holdfast.components.spec.data import Data
from holdfast.components.spec.identity import fields_of

PREPROCESS_VERSION = 1  # raised when the same input would give other bytes


def identify(spec: Spec) -> str:
    """The dataset id of a spec: 16 hexadecimal digits. Hashes the sources and tokenises nothing.

    Raises MissingError, AccessDeniedError or DataError when a source cannot be found or read.
    """
    return identity_of(spec.data, resolve(spec.data))


def identity_of(data: Data, sources: Sequence[ResolvedSource]) -> str:
    """The dataset id of sources that are resolved already. Raises what reading a tokenizer's file raises."""
    settings = dataset_settings(data)
    if data.tokenizer.kind == "file":
        from holdfast.components.corpus.tokenizer import read_file

        settings["tokenizer"]["path"] = blake3(read_file(data.tokenizer)).hexdigest()
    content = [
        {"text_field": resolved.source.text_field, "files": [file.content for file in resolved.files]}
        for resolved in sources
    ]
    return digest({"version": PREPROCESS_VERSION, "settings": settings, "sources": content})


def dataset_settings(data: Data) -> dict[str, Any]:
    """The settings that decide the bytes of a dataset. Weights and document masks act when batches are read."""
    fields = fields_of(data)
    return {name: fields[name] for name in ("tokenizer", "cleaning", "validation_fraction", "shard_tokens")}
