"""The `data` section: where text comes from, how it is cleaned, tokenized and split."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from holdfast.spec.functions import Function
from holdfast.spec.section import Section, runtime_field


def _also_text(schema: dict[str, Any]) -> None:
    """Let editors accept the short form."""
    schema["type"] = ["object", "string"]


class FieldMap(Section):
    """The keys (columns) of records in another layout: the name of a preset, or a mapping."""

    model_config = ConfigDict(json_schema_extra=_also_text)

    preset: Literal["alpaca", "sharegpt", "prompt_completion"] | None = Field(
        None,
        description="`alpaca`: instruction, input, output. `sharegpt`: conversations of {from, value}. "
        "`prompt_completion`: prompt, completion. The other fields replace single keys of it.",
    )
    messages: str | None = Field(None, description="The key of the list of messages.")
    role: str | None = Field(None, description="The key of a message's role.")
    content: str | None = Field(None, description="The key of a message's text.")
    roles: dict[str, str] = Field({}, max_length=64, description="Names of roles, by their names in the records.")
    system: str | None = Field(None, description="The key of a system prompt, which becomes the first message.")
    prompt: str | None = Field(None, description="The key of the prompt: a text or a list of messages.")
    input: str | None = Field(None, description="The key of a text that follows the prompt in a new line.")
    completion: str | None = Field(None, description="The key of the answer: a text or a list of messages.")
    chosen: str | None = Field(None, description="The key of the better answer (kind: preferences).")
    rejected: str | None = Field(None, description="The key of the worse answer (kind: preferences).")
    label: str | None = Field(None, description="The key of the label: true, false, 1 or 0 (kind: unpaired).")
    tools: str | None = Field(None, description="The key of the tools that the chat template gets.")

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: object) -> object:
        return {"preset": value} if isinstance(value, str) else value


class Source(Section):
    """One source of text."""

    uri: str = Field(
        min_length=1,
        description="Where the text is: a path or glob, `s3://bucket/prefix-or-glob`, `dvc:path` (a path that DVC "
        "tracks), `hf://datasets/owner/name[@revision][/path-or-glob]`, or `python:stdlib` (the source of the Python "
        "standard library).",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "json", "csv", "arrow", "zip", "tar", "megatron"] = Field(
        "auto",
        description="Format of the files. `auto` uses the suffix, without .gz, .zst, .xz or .bz2: .jsonl, .json, .csv, "
        ".tsv, .parquet, .arrow, .zip, .tar (WebDataset), or else one text document per file. It refuses suffixes of "
        "data that is not text. `megatron` reads tokens from .bin and .idx.",
    )
    reader: Function | None = Field(
        None,
        description="Your own reader of each file, instead of `format`: a function of its bytes and its name that "
        "yields texts.",
    )
    text_field: str = Field("text", description="The key (jsonl) or column (parquet) that holds a document's text.")
    fields: FieldMap | None = Field(
        None,
        description="The keys of conversations, pairs or answers in another layout: `alpaca`, `sharegpt`, "
        "`prompt_completion`, or a mapping. Default: the layout of `data.kind`.",
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Weight of this source in training, relative to the other weights. Give it for every source or for "
        "none. Without weights each source counts by its tokens.",
    )
    repo: str = Field(
        ".", description="For `dvc:` sources: the Git repository (path or URL) in which DVC tracks the path."
    )
    revision: str | None = Field(
        None, description="For `dvc:` sources: the Git revision (commit, tag or branch). Default: the work tree."
    )


class Tokenizer(Section):
    """Train a byte-level BPE tokenizer on the corpus, or use an existing tokenizer."""

    kind: Literal["bpe", "file"] = Field("bpe", description="`bpe` trains a tokenizer; `file` uses `path`.")
    vocabulary: int = Field(
        4096, ge=258, le=1_000_000, description="Size of the vocabulary to train, in tokens (kind: bpe)."
    )
    sample_bytes: int = Field(
        64 * 2**20,
        ge=1,
        description="Text that the BPE is trained on, in bytes: an even sample of the corpus (kind: bpe).",
    )
    path: str | None = Field(
        None, description="A Hugging Face `tokenizer.json`: a path, an s3:// or an hf:// URL (kind: file)."
    )
    rows: int | None = Field(
        None,
        ge=2,
        le=2**30,
        description="Rows of the model's embedding, if the weights have more rows than the tokenizer has tokens "
        "(kind: file).",
    )
    end_of_text: str = Field("<|endoftext|>", min_length=1, description="The token that ends every document.")


class Chat(Section):
    """How conversations become tokens (all kinds but text)."""

    template: str | None = Field(
        None,
        description="The chat template: a Jinja file, or a `tokenizer_config.json` that has one. It is a path, an "
        "s3:// or an hf:// URL. Default: the one in the folder of `data.tokenizer.path`.",
    )


class NearDuplicates(Section):
    """Documents that are similar to an earlier one, found by MinHash. Two documents with the similarity s (the shared
    part of their n-grams) count as near duplicates with the probability 1 - (1 - s^rows)^bands."""

    words: int = Field(5, ge=1, le=64, description="Words of an n-gram.")
    bands: int = Field(14, ge=1, le=64, description="Bands of hashes. More bands find less similar documents.")
    rows: int = Field(8, ge=1, le=64, description="Hashes of a band. More rows demand more similarity.")


class Decontamination(Section):
    """Documents that share a run of words with a task of the evaluation."""

    tasks: tuple[str, ...] = Field(
        min_length=1,
        max_length=256,
        description="Files of tasks: .jsonl or .json, of which every text counts, or text with a line for each item. A "
        "path, an s3:// or an hf:// URL.",
    )
    words: int = Field(13, ge=4, le=64, description="Consecutive words that a document may not share with a task.")


class Cleaning(Section):
    """Cleaning of a document before it is tokenized. Every dropped document is counted under its reason. In
    conversations and preferences, cleaning applies to the texts of messages, never to tools or answers of tools."""

    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normalization form.")
    min_characters: int = Field(
        1, ge=0, description="Minimum length of a document, in characters. Shorter ones are dropped."
    )
    max_characters: int = Field(
        10_000_000, ge=1, description="Maximum length of a document, in characters. Longer ones are dropped."
    )
    max_repetition: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Maximum fraction of non-empty lines that repeat an earlier line. Documents with more are dropped; "
        "1 keeps all.",
    )
    deduplicate: bool = Field(
        True, description="Drop documents whose normalized text occurred before (exact, by content hash)."
    )
    near_duplicates: NearDuplicates | None = Field(
        None, description="Also drop documents that are similar to an earlier one. `{}` takes the defaults."
    )
    decontaminate: Decontamination | None = Field(
        None, description="Drop documents that share words with files of evaluation tasks."
    )
    filters: tuple[Function, ...] = Field(
        (),
        max_length=16,
        description="Your own filters: functions of a document's text that return whether it is kept.",
    )
    on_bad_record: Literal["fail", "skip"] = Field(
        "fail",
        description="What to do with damaged files, files that are not text, undecodable bytes, lines that are not "
        "JSON, and records without text. `fail` names it and stops. `skip` counts it and shows an example.",
    )


class Shuffle(Section):
    """Order of the samples of an epoch."""

    kind: Literal["global", "blocks"] = Field(
        "global",
        description="`global` shuffles all samples. `blocks` shuffles blocks of the corpus, and samples within a "
        "window of blocks. With `blocks`, a node reads only its part of a corpus in S3.",
    )
    block_tokens: int = Field(2**20, ge=1024, le=2**31, description="Size of a block, in tokens (kind: blocks).")
    window: int = Field(
        4, ge=1, le=1024, description="Blocks whose samples are mixed, for each row of the global batch (kind: blocks)."
    )


class Data(Section):
    """Sources, tokenizer, cleaning, splits and order."""

    kind: Literal["text", "chat", "preferences", "unpaired", "prompts"] = Field(
        "text",
        description="`text`: documents. Every token counts in the loss. `chat`: conversations (jsonl with `messages`), "
        "packed whole into samples. Only the tokens of the assistant count. `preferences`: prompts with a chosen and a "
        "rejected answer (jsonl with `prompt`, `chosen`, `rejected`). `unpaired`: prompts with one answer that is "
        "desirable or not (jsonl with `prompt`, `completion`, `label`). `prompts`: prompts that the model answers "
        "(jsonl with `prompt` or `messages`, and any further keys for the rewards). See `training.objective`.",
    )
    sources: tuple[Source, ...] = Field(min_length=1, max_length=1000, description="Where the text comes from.")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="How text becomes tokens.")
    chat: Chat = Field(default_factory=Chat, description="How conversations become tokens.")
    cleaning: Cleaning = Field(default_factory=Cleaning, description="Normalization, filters and deduplication.")
    validation_fraction: float = Field(
        0.02, ge=0, lt=1, description="Fraction of documents held out for evaluation, chosen by content hash."
    )
    document_masks: bool = Field(
        False,
        description="Attention does not cross the end of a document inside a packed sequence. With every `kind` but "
        "`text` the default is true, and the only value.",
    )
    shuffle: Shuffle = Field(default_factory=Shuffle, description="Order of the samples in training.")
    shard_tokens: int = Field(16 * 2**20, ge=1024, le=2**31, description="Maximum size of a token shard, in tokens.")
    workers: int = runtime_field(0, "Processes that tokenize; 0 uses every core.", ge=0, le=1024)
    fan_out: int = runtime_field(
        1,
        "Pods or jobs that tokenize concurrently, on a backend with several machines; 1 does all in one step. The "
        "bytes of the dataset are the same.",
        ge=1,
        le=256,
    )

    @model_validator(mode="before")
    @classmethod
    def _masks_of_kind(cls, value: object) -> object:
        """Conversations and answers that are packed into one sequence do not see one another."""
        if isinstance(value, Mapping) and value.get("kind", "text") != "text":
            return {"document_masks": True, **value}
        return value


class NoData(Data):
    """The section of a spec whose training script reads its own data."""

    sources: tuple[Source, ...] = ()
