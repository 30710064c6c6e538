"""Tokenizer of a dataset: trained on an even sample of the corpus, or provided by the user and checked.

Training is a pure function of the corpus and the settings. The pieces of the corpus determine the sample, and ids break
ties between merges. A provided tokenizer must have the end-of-text token. Whether it reproduces its input text is
checked for each document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blake3 import blake3

from holdfast.corpus.encode import load_tokenizer, settled
from holdfast.corpus.files import read_user_file
from holdfast.corpus.own import NO_FUNCTIONS, OwnFunctions, cleaning_settings
from holdfast.corpus.units import Piece, documents
from holdfast.dataset.manifest import DtypeName
from holdfast.dataset.shards import dtype_for
from holdfast.dataset.vocabulary import vocabulary_size
from holdfast.runtime.logs import log
from holdfast.spec import digest
from holdfast.spec.data import Cleaning, Data, Tokenizer
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout

if TYPE_CHECKING:
    from holdfast.corpus.chat import ChatTemplate

MAX_FILE_BYTES = 512 * 2**20
SAMPLED_PIECE_BYTES = 256 * 2**10  # minimum text from each sampled piece
LOOKS_LIKE_END = re.compile(r"end.?of.?text|eot|eos|im_end|</s>|\[sep\]|end_of_turn", re.IGNORECASE)


@dataclass(frozen=True)
class Prepared:
    """A checked tokenizer."""

    json: str
    digest: str  # blake3
    vocabulary: int
    dtype: DtypeName
    end_of_text: int
    template: str = ""  # of conversations, in the format of `ChatTemplate.dump`


def read_file(tokenizer: Tokenizer) -> bytes:
    """The bytes of a provided tokenizer. Raises MissingError, DataError."""
    remedy = "name a Hugging Face tokenizer.json in data.tokenizer.path"
    return read_user_file(tokenizer.path or "", "data.tokenizer.path", MAX_FILE_BYTES, remedy)


def read_settled(tokenizer: Tokenizer) -> str:
    """A provided tokenizer in its used form: without dropout, and with an `end_of_text` that text cannot produce.
    Raises MissingError, DataError."""
    path = tokenizer.path or ""
    try:
        text = read_file(tokenizer).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"data.tokenizer.path: {path} is not UTF-8; name a Hugging Face tokenizer.json") from None
    try:
        return settled(text, tokenizer.end_of_text)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return text  # no tokenizer; `prepare` refuses it


def trained_key(data: Data, corpus: str) -> str:
    """The store key of the tokenizer that `data` trains on a corpus with the digest `corpus`."""
    decisive = {
        "tokenizer": data.tokenizer.model_dump(),
        "cleaning": cleaning_settings(data.cleaning, "near_duplicates"),
        "corpus": corpus,
    }
    return layout.unit(f"bpe-{digest(decisive)}", "tokenizer.json")


def prepare(data: Data, corpus: str, pieces: Sequence[Piece], store: Store) -> Prepared:
    """The tokenizer for `data`. `corpus` is the digest of the corpus, under which a trained tokenizer is kept in the
    store."""
    settings = data.tokenizer
    if settings.kind == "file":
        text = read_settled(settings)
    else:
        key = trained_key(data, corpus)
        if store.stat(key) is not None:
            text = store.get(key).decode()
        else:
            text = train(settings, sample(pieces, data.cleaning, settings.sample_bytes, OwnFunctions.of(data)))
            store.put(key, text.encode())
    if data.kind != "text":  # marks take the upper bits
        from holdfast.corpus.added_tokens import require_added_tokens
        from holdfast.corpus.chat import read_template

        checked, template = _checked(text, settings), read_template(data)
        if settings.path is not None:
            require_added_tokens(settings.path, text, template)
        require_end_of_turns(data, text, template, checked.end_of_text)
        return replace(checked, dtype="uint32", template=template.dump())
    return _checked(text, settings)


def train(settings: Tokenizer, texts: Iterator[str]) -> str:
    """Train a byte-level BPE and return its tokenizer.json. Raises DataError without text."""
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    first = next(texts, None)
    if first is None:
        raise DataError(
            "data.sources: no text to train a tokenizer on; every document is empty or was dropped: "
            "look at data.sources and data.cleaning"
        )
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[settings.end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def all_texts() -> Iterator[str]:
        yield first
        yield from texts

    tokenizer.train_from_iterator(all_texts(), trainer)
    return str(tokenizer.to_str())


def sample(pieces: Sequence[Piece], cleaning: Cleaning, limit: int, own: OwnFunctions = NO_FUNCTIONS) -> Iterator[str]:
    """An even sample of the cleaned text: equal shares of evenly spaced pieces, or all of a small corpus."""
    total = sum(piece.bytes for piece in pieces)
    chosen = list(pieces)
    if total > limit:
        count = max(1, min(len(pieces), limit // SAMPLED_PIECE_BYTES))
        chosen = [pieces[number * len(pieces) // count] for number in range(count)]
    for number, piece in enumerate(chosen):
        # Compressed pieces hold more text than bytes, so the share is computed from the limit.
        share = limit * (number + 1) // len(chosen) - limit * number // len(chosen) if total > limit else limit
        remaining = share
        for _, _, text in documents(piece, cleaning, own):
            if isinstance(text, str) and text:
                yield text[:remaining]
                remaining -= len(text)
                if remaining <= 0:
                    break


def _checked(text: str, settings: Tokenizer) -> Prepared:
    subject = f"data.tokenizer.path: {settings.path}" if settings.kind == "file" else "the trained tokenizer"
    try:
        tokenizer = load_tokenizer(text)
        json.loads(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataError(f"{subject}: is no tokenizer ({error}); name a Hugging Face tokenizer.json") from None
    end = tokenizer.token_to_id(settings.end_of_text)
    if end is None:
        likely = sorted(token for token in tokenizer.get_vocab(with_added_tokens=True) if LOOKS_LIKE_END.search(token))
        remedy = f"it has {', '.join(map(repr, likely[:8]))}" if likely else "none of its tokens looks like one"
        raise DataError(
            f"{subject}: has no token {settings.end_of_text!r}, data.tokenizer.end_of_text; {remedy}: set it to that, "
            "or add the token to the tokenizer"
        )
    vocabulary = vocabulary_size(text)
    if settings.rows is not None:
        if settings.rows < vocabulary:
            raise DataError(
                f"data.tokenizer.rows: {settings.rows} are fewer than the {vocabulary} tokens of {settings.path}; "
                "write those of the weights, or leave it out"
            )
        vocabulary = settings.rows
    return Prepared(text, blake3(text.encode()).hexdigest(), vocabulary, dtype_for(vocabulary), end)


def require_end_of_turns(data: Data, tokenizer_json: str, template: ChatTemplate, end_of_text: int) -> None:
    """Refuse an `end_of_text` that does not end the assistant's turns, because a model exported with it would not
    stop. If the template does not show what ends them, it compares the `eos_token` next to the tokenizer and logs a
    warning. Raises DataError."""
    from holdfast.corpus.chat import ending_of_turns

    end_token = data.tokenizer.end_of_text
    ending = ending_of_turns(tokenizer_json, template) if data.kind == "chat" else None
    if ending is not None and load_tokenizer(tokenizer_json).token_to_id(ending) != end_of_text:
        raise DataError(
            f"data.tokenizer.end_of_text: is {end_token!r}, but the chat template ends the assistant's turns with "
            f"{ending!r}: the tuned model would not stop; set it to {ending!r}"
        )
    eos = template.specials.get("eos_token")
    if ending is None and eos is not None and eos != end_token:
        log.warning(
            "data.tokenizer.end_of_text: is %r, and the eos_token next to the tokenizer is %r; set it to what ends the "
            "assistant's turns, so that the tuned model stops",
            end_token,
            eos,
        )
