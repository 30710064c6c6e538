"""Dataset id: a digest of the sources' bytes and of the settings that determine the dataset's bytes.

It covers no paths: the same files elsewhere are the same dataset. It needs no tokenization.
"""

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from holdfast.corpus.decontamination import tasks_digest
from holdfast.corpus.field_maps import dump_map
from holdfast.corpus.sources import ResolvedSource, resolve
from holdfast.spec import Spec, digest
from holdfast.spec.data import Data
from holdfast.spec.identity import fields_of, function_identity

PREPROCESS_VERSION = 1  # raised when the same input would give other bytes
CONVERSATION_VERSION = 3  # the same for conversations and preferences only


def identify(spec: Spec) -> str:
    """The dataset id of a spec: 16 hexadecimal digits. Hashes the sources without tokenization. Empty for a training
    script, which reads its own data.

    Raises MissingError, AccessDeniedError or DataError if a source cannot be found or read.
    """
    return identity_of(spec, resolve(spec.data)) if spec.data.sources else ""


def identity_of(spec: Spec, sources: Sequence[ResolvedSource]) -> str:
    """The dataset id of resolved sources. Raises what reading a tokenizer's file raises."""
    data = spec.data
    settings = dataset_settings(data, sample_tokens(spec))
    if data.kind != "text":
        from holdfast.corpus.chat import read_template

        settings["chat"]["template"] = read_template(data).dump()
        settings["chat"]["version"] = CONVERSATION_VERSION
    if data.tokenizer.kind == "file":
        from holdfast.corpus.tokenizer import read_settled

        settings["tokenizer"]["path"] = blake3(read_settled(data.tokenizer).encode()).hexdigest()
    content = []
    for number, resolved in enumerate(sources):
        source: dict[str, Any] = {
            "text_field": resolved.source.text_field,
            "files": [file.content for file in resolved.files],
        }
        if resolved.source.reader is not None:
            source["reader"] = function_identity(f"data.sources.{number}.reader", resolved.source.reader)
        if fields := dump_map(resolved.source.fields):
            source["fields"] = fields
        content.append(source)
    return digest({"version": PREPROCESS_VERSION, "settings": settings, "sources": content})


def sample_tokens(spec: Spec) -> int:
    """Tokens of the samples that conversations are packed into. 0 for text, which is divided when batches are read,
    and for prompts, which are read one by one."""
    return 0 if spec.data.kind in ("text", "prompts") else spec.model.context


def dataset_settings(data: Data, packed: int = 0) -> dict[str, Any]:
    """The settings that determine the bytes of a dataset. `packed` is the number of tokens of a sample of
    conversations. Weights and document masks apply only when batches are read, so they are not included."""
    fields = fields_of(data)
    settings = {name: fields[name] for name in ("tokenizer", "cleaning", "validation_fraction", "shard_tokens")}
    if data.cleaning.filters:
        named = enumerate(data.cleaning.filters)
        settings["cleaning"]["filters"] = [function_identity(f"data.cleaning.filters.{n}", each) for n, each in named]
    else:
        del settings["cleaning"]["filters"]
    if data.cleaning.near_duplicates is None:
        del settings["cleaning"]["near_duplicates"]
    del settings["cleaning"]["decontaminate"]
    if data.cleaning.decontaminate is not None:
        settings["cleaning"]["decontaminate"] = tasks_digest(data.cleaning.decontaminate)
    if data.tokenizer.rows is None:
        del settings["tokenizer"]["rows"]
    if data.kind != "text":
        settings["chat"] = {**fields["chat"], "packed": packed, "kind": data.kind}
    return settings
