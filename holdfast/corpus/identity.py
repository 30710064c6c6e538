"""The dataset id: a digest over the bytes of the sources and over the settings that decide the bytes of the dataset.

Bytes and settings, not places: the same files under another path are the same dataset. Needs no tokenising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from holdfast.corpus.sources import ResolvedSource, resolve
from holdfast.spec import Spec, digest
from holdfast.spec.data import Data
from holdfast.spec.identity import fields_of

PREPROCESS_VERSION = 1  # raised when the same input would give other bytes
CONVERSATION_VERSION = 3  # raised when that is so of conversations and preferences alone


def identify(spec: Spec) -> str:
    """The dataset id of a spec: 16 hexadecimal digits. Hashes the sources and tokenises nothing.

    Raises MissingError, AccessDeniedError or DataError when a source cannot be found or read.
    """
    return identity_of(spec, resolve(spec.data))


def identity_of(spec: Spec, sources: Sequence[ResolvedSource]) -> str:
    """The dataset id of sources that are resolved already. Raises what reading a tokenizer's file raises."""
    data = spec.data
    settings = dataset_settings(data, sample_tokens(spec))
    if data.kind != "text":
        from holdfast.corpus.chat import read_template

        settings["chat"]["template"] = read_template(data).dump()
        settings["chat"]["version"] = CONVERSATION_VERSION
    if data.tokenizer.kind == "file":
        from holdfast.corpus.tokenizer import read_settled

        settings["tokenizer"]["path"] = blake3(read_settled(data.tokenizer).encode()).hexdigest()
    content = [
        {"text_field": resolved.source.text_field, "files": [file.content for file in resolved.files]}
        for resolved in sources
    ]
    return digest({"version": PREPROCESS_VERSION, "settings": settings, "sources": content})


def sample_tokens(spec: Spec) -> int:
    """Tokens of the samples that conversations are packed into; 0 for text, which is cut when batches are read."""
    return 0 if spec.data.kind == "text" else spec.model.context


def dataset_settings(data: Data, packed: int = 0) -> dict[str, Any]:
    """The settings that decide the bytes of a dataset, whose conversations are packed into samples of `packed` tokens.
    Weights and document masks act when batches are read."""
    fields = fields_of(data)
    settings = {name: fields[name] for name in ("tokenizer", "cleaning", "validation_fraction", "shard_tokens")}
    if data.tokenizer.rows is None:
        del settings["tokenizer"]["rows"]
    if data.kind != "text":
        settings["chat"] = {**fields["chat"], "packed": packed, "kind": data.kind}
    return settings
