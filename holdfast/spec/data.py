"""The `data` section: where text comes from, how it is cleaned, tokenised and split."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.spec.section import Section, runtime_field


class Source(Section):
    """One place that text comes from."""

    uri: str = Field(
        min_length=1,
        description="Where the text is: a path or glob, `s3://bucket/prefix-or-glob`, `dvc:path` (a path that DVC "
        "tracks), or `python:stdlib` (the source of the Python standard library).",
    )
    format: Literal["auto", "text", "jsonl", "parquet"] = Field(
        "auto",
        description="How documents lie in a file. `auto` goes by the suffix, after removing .gz or .zst: .jsonl, "
        ".parquet, or one text document a file. It refuses suffixes of data that are no text (.json, .csv, .zip).",
    )
    text_field: str = Field("text", description="The key (jsonl) or column (parquet) that holds a document's text.")
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of this source in training, relative to the other weights. Give it for every source or for "
        "none; without weights each source counts by its tokens.",
    )
    repo: str = Field(
        ".", description="For `dvc:` sources: the Git repository (path or URL) in which DVC tracks the path."
    )
    revision: str | None = Field(
        None, description="For `dvc:` sources: the Git revision (commit, tag or branch); none reads the work tree."
    )


class Tokenizer(Section):
    """Train a byte-level BPE on the corpus, or bring a tokenizer."""

    kind: Literal["bpe", "file"] = Field("bpe", description="`bpe` trains one here; `file` takes `path`.")
    vocabulary: int = Field(
        4096, ge=258, le=1_000_000, description="Size of the vocabulary to train, in tokens (kind: bpe)."
    )
    sample_bytes: int = Field(
        64 * 2**20,
        ge=1,
        description="How much text the BPE is trained on, in bytes: an even sample of the corpus (kind: bpe).",
    )
    path: str | None = Field(
        None, description="A Hugging Face `tokenizer.json`: a path, an s3:// or an hf:// URL (kind: file)."
    )
    rows: int | None = Field(
        None,
        ge=2,
        le=2**30,
        description="Rows of the model's embedding, where weights have more of them than the tokenizer has tokens "
        "(kind: file).",
    )
    end_of_text: str = Field("<|endoftext|>", min_length=1, description="The token that ends every document.")


class Chat(Section):
    """How conversations become tokens (kind: chat or preferences)."""

    template: str | None = Field(
        None,
        description="The chat template: a Jinja file, or a `tokenizer_config.json` that has one; a path, an s3:// or "
        "an hf:// URL. None takes the one beside `data.tokenizer.path`.",
    )


class Cleaning(Section):
    """What is done to a document before it is tokenised. Every document dropped is counted under its reason. Of
    conversations and preferences it acts on the texts of the messages, never on tools or on what tools answered."""

    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normalisation form.")
    min_characters: int = Field(1, ge=0, description="Shorter documents are dropped, in characters.")
    max_characters: int = Field(10_000_000, ge=1, description="Longer documents are dropped, in characters.")
    max_repetition: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Documents in which a larger share of the non-empty lines repeats an earlier line are dropped; "
        "1 keeps all.",
    )
    deduplicate: bool = Field(
        True, description="Drop documents whose normalised text was seen before (exact, by content hash)."
    )
    on_bad_record: Literal["fail", "skip"] = Field(
        "fail",
        description="What to do with damaged files, files that are no text, undecodable bytes, a line that is not "
        "JSON, or a record without text: `fail` names it and stops; `skip` counts it and shows an example.",
    )


class Shuffle(Section):
    """In which order the samples of an epoch come."""

    kind: Literal["global", "blocks"] = Field(
        "global",
        description="`global`: every sample may come anywhere. `blocks`: blocks of the corpus are shuffled, and "
        "samples within a window of blocks, so that a node reads its share of a corpus in S3 and not all of it.",
    )
    block_tokens: int = Field(2**20, ge=1024, le=2**31, description="Size of a block, in tokens (kind: blocks).")
    window: int = Field(
        4, ge=1, le=1024, description="Blocks of each row of the global batch whose samples are mixed (kind: blocks)."
    )


class Data(Section):
    """Sources, tokenizer, cleaning, splits and order."""

    kind: Literal["text", "chat", "preferences"] = Field(
        "text",
        description="`text`: documents, every token of which counts in the loss. `chat`: conversations (jsonl with "
        "`messages`), packed whole into samples, of which only what the assistant says counts. `preferences`: prompts "
        "with a chosen and a rejected answer (jsonl with `prompt`, `chosen`, `rejected`), for direct preference "
        "optimisation.",
    )
    sources: tuple[Source, ...] = Field(min_length=1, max_length=1000, description="Where the text comes from.")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="How text becomes tokens.")
    chat: Chat = Field(default_factory=Chat, description="How conversations become tokens.")
    cleaning: Cleaning = Field(default_factory=Cleaning, description="Normalisation, filters and deduplication.")
    validation_fraction: float = Field(
        0.02, ge=0, lt=1, description="Share of documents held out for evaluation, chosen by content hash."
    )
    document_masks: bool = Field(
        False, description="Attention does not cross the end of a document inside a packed sequence."
    )
    shuffle: Shuffle = Field(default_factory=Shuffle, description="The order of training.")
    shard_tokens: int = Field(16 * 2**20, ge=1024, le=2**31, description="Largest token shard, in tokens.")
    workers: int = runtime_field(0, "Processes that tokenise; 0 takes every core.", ge=0, le=1024)
    fan_out: int = runtime_field(
        1,
        "Pods or jobs that tokenise at once, on a backend that has several machines; 1 does all in one step. The "
        "dataset is the same, to the byte.",
        ge=1,
        le=256,
    )
