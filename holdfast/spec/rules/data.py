"""Rules of `data`: sources, tokenizer, cleaning, shuffle and held-out text."""

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec


def check_held_out_data(spec: Spec) -> Iterator[Problem]:
    """Text is held out for evaluation. Without this rule a run would fail only after training."""
    if spec.data.validation_fraction == 0:
        yield Problem(
            "data.validation_fraction", 0, "leaves no text to evaluate the model on", "use a fraction such as 0.01"
        )


def check_text_field(spec: Spec) -> Iterator[Problem]:
    """Plain text has no fields."""
    for index, source in enumerate(spec.data.sources):
        if (
            source.format in ("text", "megatron")
            and source.text_field != type(source).model_fields["text_field"].default
        ):
            yield Problem(
                f"data.sources.{index}.text_field",
                source.text_field,
                f"is not used by format: {source.format}",
                "remove it, or use a format with fields, such as jsonl or parquet",
            )


def check_source_weights(spec: Spec) -> Iterator[Problem]:
    """All sources have a mixture weight, or none has one."""
    weighted = [source.weight is not None for source in spec.data.sources]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        yield Problem(
            f"data.sources.{index}.weight",
            None,
            "is missing, and other sources have a weight",
            "give every source a weight, or remove all weights",
        )


def check_tokenizer(spec: Spec) -> Iterator[Problem]:
    """A tokenizer file is named only if one is used, and settings of its training only if one is trained."""
    tokenizer = spec.data.tokenizer
    if tokenizer.kind == "file":
        for name in ("vocabulary", "sample_bytes"):
            value = getattr(tokenizer, name)
            if value != type(tokenizer).model_fields[name].default:
                yield Problem(f"data.tokenizer.{name}", value, "is not used by kind: file", "remove it")
    elif tokenizer.rows is not None:
        yield Problem("data.tokenizer.rows", tokenizer.rows, "is not used by kind: bpe", "remove it, or use kind: file")
    if tokenizer.kind == "file" and not tokenizer.path:
        yield Problem(
            "data.tokenizer.path", None, "is missing for kind: file", "name a tokenizer.json, or use kind: bpe"
        )
    if tokenizer.kind == "bpe" and tokenizer.path:
        yield Problem("data.tokenizer.path", tokenizer.path, "is not used by kind: bpe", "remove it, or use kind: file")


def check_plain_text(spec: Spec) -> Iterator[Problem]:
    """Text has no map of fields, and no chat template."""
    data = spec.data
    if data.kind != "text":
        return
    for index, source in enumerate(data.sources):
        if source.fields is not None:
            remedy = "remove it, and name the key of the text in text_field"
            yield Problem(f"data.sources.{index}.fields", "a map", "is not used by data.kind: text", remedy)
    if data.chat.template is not None:
        message, remedy = "is not used by data.kind: text", "remove it, or use another kind"
        yield Problem("data.chat.template", data.chat.template, message, remedy)


def check_chat(spec: Spec) -> Iterator[Problem]:
    """Conversations have a template, a tokenizer with its tokens, and masks between them."""
    data = spec.data
    if data.kind == "text":
        return
    keys = {
        "chat": "`messages`",
        "preferences": "`prompt`, `chosen` and `rejected`",
        "unpaired": "`prompt`, `completion` and `label`",
    }.get(data.kind, "`prompt` or `messages`")
    if data.tokenizer.kind != "file":
        yield Problem(
            "data.tokenizer.kind",
            data.tokenizer.kind,
            "has no tokens of a chat template",
            "use kind: file with the tokenizer.json of the model that you tune",
        )
    if not data.document_masks:
        message, remedy = "lets an answer attend to conversations that are packed before it", "remove it, or use true"
        yield Problem("data.document_masks", False, message, remedy)
    for index, source in enumerate(data.sources):
        if source.format in ("text", "megatron"):
            yield Problem(
                f"data.sources.{index}.format", source.format, "holds no conversations", f"use jsonl with {keys}"
            )
        if source.text_field != type(source).model_fields["text_field"].default:
            yield Problem(
                f"data.sources.{index}.text_field",
                source.text_field,
                f"is not used by data.kind: {data.kind}",
                f"remove it: the text is read from {keys}",
            )


def check_tokenized(spec: Spec) -> Iterator[Problem]:
    """Tokens that are taken as they are have a tokenizer."""
    for index, source in enumerate(spec.data.sources):
        if source.format == "megatron" and spec.data.tokenizer.kind != "file":
            remedy = "use kind: file with the tokenizer that made them"
            yield Problem(f"data.sources.{index}.format", "megatron", "holds tokens of another tokenizer", remedy)


def check_shuffle(spec: Spec) -> Iterator[Problem]:
    """Fields for blocks are given only with a shuffle of blocks."""
    shuffle = spec.data.shuffle
    for name in ("block_tokens", "window"):
        value = getattr(shuffle, name)
        if shuffle.kind == "global" and value != type(shuffle).model_fields[name].default:
            remedy = "remove it, or use kind: blocks"
            yield Problem(f"data.shuffle.{name}", value, "is not used by kind: global", remedy)


def check_document_lengths(spec: Spec) -> Iterator[Problem]:
    """The length filters do not exclude every document."""
    cleaning = spec.data.cleaning
    if cleaning.min_characters > cleaning.max_characters:
        yield Problem(
            "data.cleaning.min_characters",
            cleaning.min_characters,
            f"is above data.cleaning.max_characters = {cleaning.max_characters}: every document would be dropped",
            f"use at most {cleaning.max_characters}",
        )


def check_dvc(spec: Spec) -> Iterator[Problem]:
    """`repo` and `revision` are only for DVC sources."""
    for index, source in enumerate(spec.data.sources):
        if source.uri.startswith("dvc:"):
            continue
        for field, value, default in (("repo", source.repo, "."), ("revision", source.revision, None)):
            if value != default:
                yield Problem(
                    f"data.sources.{index}.{field}",
                    value,
                    "is only for `dvc:` sources",
                    f"remove it, or write the source as dvc:{source.uri}",
                )


def check_own_readers(spec: Spec) -> Iterator[Problem]:
    """A reader of user code replaces the format, and yields documents of text. Filters are for text, too."""
    for index, source in enumerate(spec.data.sources):
        if source.reader is None:
            continue
        for name in ("format", "text_field"):
            value = getattr(source, name)
            if value != type(source).model_fields[name].default:
                yield Problem(
                    f"data.sources.{index}.{name}", value, "is not used by a source with a reader", "remove it"
                )
        if spec.data.kind != "text":
            remedy = "convert the files to jsonl, or use kind: text"
            yield Problem(f"data.sources.{index}.reader", source.reader.use, f"yields no {spec.data.kind}", remedy)
    if spec.data.cleaning.filters and spec.data.kind != "text":
        remedy = "filter the records before they are read, or use kind: text"
        yield Problem("data.cleaning.filters", spec.data.kind, "are for kind: text", remedy)
