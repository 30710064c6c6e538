"""The tokenizer of a dataset: trained on an even sample of the corpus, or brought and checked that it fits.

Training is a pure function of the corpus and the settings: the sample is fixed by the pieces of the corpus, and ties
between merges are broken by their ids. A tokenizer that is brought must have the end-of-text token and give back the
very text it was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from holdfast.components.corpus.brought import read_brought
from holdfast.components.corpus.encode import Encoder, load_tokenizer
from holdfast.components.corpus.units import Piece, documents
from holdfast.components.dataset.manifest import DtypeName
from holdfast.components.dataset.shards import dtype_for
from holdfast.components.dataset.vocabulary import vocabulary_size
from holdfast.components.spec import digest
from holdfast.components.spec.data import Cleaning, Data, Tokenizer
from holdfast.components.spec.errors import DataError
from holdfast.components.store import Store, layout

MAX_FILE_BYTES = 512 * 2**20
SAMPLED_PIECE_BYTES = 256 * 2**10  # least text from each piece that is sampled
CHECKED_BYTES = 2**20  # how much text a tokenizer must give back
LOOKS_LIKE_END = re.compile(r"end.?of.?text|eot|eos|im_end|</s>|\[sep\]|end_of_turn", re.IGNORECASE)


@dataclass(frozen=True)
class Prepared:
    """A tokenizer that fits."""

    json: str
    digest: str  # blake3
    vocabulary: int
    dtype: DtypeName
    end_of_text: int
    template: str = ""  # of conversations, as `ChatTemplate.dump` writes it


def read_file(tokenizer: Tokenizer) -> bytes:
    """The bytes of a tokenizer that is brought. Raises MissingError, DataError."""
    remedy = "name a Hugging Face tokenizer.json in data.tokenizer.path"
    return read_brought(tokenizer.path or "", "data.tokenizer.path", MAX_FILE_BYTES, remedy)


def prepare(data: Data, corpus: str, pieces: Sequence[Piece], store: Store) -> Prepared:
    """The tokenizer that `data` asks for. `corpus` digests the corpus: a trained one is kept in the store by it."""
    settings = data.tokenizer
    if settings.kind == "file":
        text = _decoded(read_file(settings), settings.path or "")
    else:
        decisive = {"tokenizer": settings.model_dump(), "cleaning": data.cleaning.model_dump(), "corpus": corpus}
        key = layout.unit(f"bpe-{digest(decisive)}", "tokenizer.json")
        if store.stat(key) is not None:
            text = store.get(key).decode()
        else:
            text = train(settings, sample(pieces, data.cleaning, settings.sample_bytes))
            store.put(key, text.encode())
    if data.kind != "text":  # its marks take the upper bits
        from holdfast.components.corpus.chat import read_template

        checked = _checked(text, settings, (), data.cleaning)
        return replace(checked, dtype="uint32", template=read_template(data).dump())
    return _checked(text, settings, pieces, data.cleaning)


def train(settings: Tokenizer, texts: Iterator[str]) -> str:
    """Train a byte-level BPE and return its tokenizer.json. Raises DataError when there is no text."""
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


def sample(pieces: Sequence[Piece], cleaning: Cleaning, limit: int) -> Iterator[str]:
    """An even sample of the cleaned text: the same share of pieces that lie evenly; all of a small corpus."""
    total = sum(piece.bytes for piece in pieces)
    chosen = list(pieces)
    if total > limit:
        count = max(1, min(len(pieces), limit // SAMPLED_PIECE_BYTES))
        chosen = [pieces[number * len(pieces) // count] for number in range(count)]
    for number, piece in enumerate(chosen):
        # Compressed pieces hold more text than bytes: the share is of the limit then.
        share = limit * (number + 1) // len(chosen) - limit * number // len(chosen) if total > limit else limit
        left = share
        for _, _, text in documents(piece, cleaning):
            if isinstance(text, str) and text:
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break


def _decoded(raw: bytes, path: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"data.tokenizer.path: {path} is not UTF-8; name a Hugging Face tokenizer.json") from None


def _checked(text: str, settings: Tokenizer, pieces: Sequence[Piece], cleaning: Cleaning) -> Prepared:
    where = f"data.tokenizer.path: {settings.path}" if settings.kind == "file" else "the trained tokenizer"
    try:
        tokenizer = load_tokenizer(text)
        json.loads(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataError(f"{where}: is no tokenizer ({error}); name a Hugging Face tokenizer.json") from None
    end = tokenizer.token_to_id(settings.end_of_text)
    if end is None:
        likely = sorted(token for token in tokenizer.get_vocab(with_added_tokens=True) if LOOKS_LIKE_END.search(token))
        found = f"it has {', '.join(map(repr, likely[:8]))}" if likely else "none of its tokens looks like one"
        raise DataError(
            f"{where}: has no token {settings.end_of_text!r}, data.tokenizer.end_of_text; {found}: set it to that, "
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
    dtype = dtype_for(vocabulary)
    if settings.kind == "file":
        _gives_back(Encoder(text, dtype), where, pieces, cleaning)
    return Prepared(text, blake3(text.encode()).hexdigest(), vocabulary, dtype, end)


def _gives_back(encoder: Encoder, where: str, pieces: Sequence[Piece], cleaning: Cleaning) -> None:
    for document in sample(pieces, cleaning, CHECKED_BYTES):
        back = encoder.decode(encoder.encode(document))
        if back != document:
            at = next(
                (i for i, (a, b) in enumerate(zip(document, back, strict=False)) if a != b),
                min(len(document), len(back)),
            )
            raise DataError(
                f"{where}: does not give back the text it was given: {document[at : at + 20]!r} became "
                f"{back[at : at + 20]!r}; bring a lossless one (byte-level BPE), or train one with kind: bpe"
            )
