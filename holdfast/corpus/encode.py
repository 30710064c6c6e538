"""Text to token bytes: the tokenizer's encoding, several times faster where the result is exactly the same.

The tokens are always those of Hugging Face tokenizers. For a byte-level BPE, ASCII text is split into words by the same
rule, and the tokenizer encodes each word once, because words repeat. Non-ASCII text, for which the rule depends on
Unicode tables, goes through the tokenizer, from the last safe cut before it to the next one.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.dataset.manifest import DtypeName
from holdfast.dataset.shards import DTYPES
from holdfast.dataset.vocabulary import vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# GPT-2's rule, as ByteLevel applies it, restricted to ASCII, with \p{L}, \p{N} and \s expanded.
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+")
# Between a letter and a space before a letter the rule always cuts, in any context.
CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
BLANK = re.compile(r"[\s\u2581]+")
LOOK_BACK = 256  # characters before non-ASCII text in which the last cut is searched

CACHED_WORDS = 400_000
CACHED_LENGTH = 64  # characters: longer words rarely repeat


class LossyError(ValueError):
    """A text that its tokens do not decode to, with the position."""


class Encoder:
    """Encodes documents without special tokens: text that spells one is ordinary text."""

    def __init__(self, tokenizer_json: str, dtype: DtypeName) -> None:
        self.tokenizer = load_tokenizer(tokenizer_json)
        self._dtype = DTYPES[dtype]
        settings = json.loads(tokenizer_json)
        self._fast = is_plain_byte_level(settings)
        self._lossless = is_lossless(settings)
        self._words = _Words(self)
        self.size = vocabulary_size(tokenizer_json)  # tokens that it has

    def encode(self, text: str) -> bytes:
        """The tokens of `text`, as little-endian bytes of the dtype. Raises LossyError if they decode to another
        text."""
        tokens = self._encode(text)
        if not self._lossless:
            require_same(text, self.decode(tokens))
        return tokens

    def _encode(self, text: str) -> bytes:
        if not self._fast:
            return self.slow(text)
        if text.isascii():
            return b"".join(map(self._words.__getitem__, WORDS.findall(text)))
        return b"".join(
            b"".join(map(self._words.__getitem__, WORDS.findall(piece))) if piece.isascii() else self._words[piece]
            for piece in pieces(text)
        )

    def slow(self, text: str) -> bytes:
        """The tokenizer's own result, which `encode` must equal."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=self._dtype).tobytes()

    def decode(self, tokens: bytes) -> str:
        """The text of encoded tokens."""
        ids = np.frombuffer(tokens, dtype=self._dtype).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class _Words(dict[str, bytes]):
    """A cache of the token bytes of words and other short pieces."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self._encoder = encoder

    def __missing__(self, word: str) -> bytes:
        tokens = self._encoder.slow(word)
        if len(word) <= CACHED_LENGTH:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = tokens
        return tokens


def pieces(text: str) -> Iterator[str]:
    """Split text so that non-ASCII parts are separate, only at word boundaries."""
    at = 0
    while match := NOT_ASCII.search(text, at):
        before = max(at, match.start() - LOOK_BACK)
        cuts = [cut.start() for cut in CUT.finditer(text, before, match.start())]
        start = cuts[-1] if cuts else at
        if start > at:
            yield text[at:start]
        end = CUT.search(text, match.end())
        at = end.start() if end else len(text)
        yield text[start:at]
    if at < len(text):
        yield text[at:]


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """The tokenizer, without truncation, padding and special tokens in text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def settled(tokenizer_json: str, end_of_text: str) -> str:
    """The tokenizer without randomness, and with `end_of_text` as a special token, which text never produces. A
    tokenizer that already has these properties is returned unchanged, to the byte."""
    tokenizer = json.loads(tokenizer_json)
    model, changed = tokenizer.get("model", {}), False
    if model.get("dropout"):
        model["dropout"], changed = None, True
    for token in tokenizer.get("added_tokens") or []:
        if token.get("content") == end_of_text and not token.get("special"):
            token["special"], changed = True, True
    return json.dumps(tokenizer, ensure_ascii=False) if changed else tokenizer_json


def exact_offsets(tokenizer_json: str) -> str:
    """The tokenizer with offsets that include leading and trailing spaces of a token. Its tokens are the same."""
    tokenizer = json.loads(tokenizer_json)

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if part.get("trim_offsets"):
                part["trim_offsets"] = False
            for processor in part.get("processors") or []:
                walk(processor)

    walk(tokenizer.get("post_processor"))
    return json.dumps(tokenizer, ensure_ascii=False)


def require_same(text: str, decoded: str, *, strict: bool = True) -> None:
    """Raises LossyError unless tokens of `text` decode to it. Without `strict`, blanks and Unicode forms may differ,
    as they do around the special tokens of a conversation."""
    if decoded == text:
        return
    if not strict:
        text, decoded = (BLANK.sub("", unicodedata.normalize("NFC", value)) for value in (text, decoded))
        if decoded == text:
            return
    differ = (at for at, (value, other) in enumerate(zip(text, decoded, strict=False)) if value != other)
    at = next(differ, min(len(text), len(decoded)))
    raise LossyError(
        f"does not come back from the tokenizer: {text[at : at + 20]!r} became {decoded[at : at + 20]!r}; bring a "
        "lossless tokenizer (byte-level BPE), or train one with kind: bpe"
    )


def is_lossless(tokenizer: dict[str, Any]) -> bool:
    """Whether the tokenizer's structure alone proves that tokens decode to their text: a byte-level BPE with a token
    for each byte, without changes to text. For other tokenizers each document is compared."""
    from tokenizers import pre_tokenizers

    model, pre_tokenizer = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
        and set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
        and not tokenizer.get("normalizer")
        and (tokenizer.get("decoder") or {}).get("type") == "ByteLevel"
        and bool(steps)
        and steps[-1].get("type") == "ByteLevel"
        and all(
            (step.get("type") == "ByteLevel" and not step.get("add_prefix_space", True))
            or (step.get("type") in ("Split", "Digits") and step.get("behavior", "Isolated") != "Removed")
            for step in steps
        )
        and not any(token.get("lstrip") or token.get("rstrip") for token in tokenizer.get("added_tokens") or [])
    )


def is_plain_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether the words of `WORDS` are the tokenizer's words, and a word's tokens depend only on the word."""
    model, pre_tokenizer = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and not tokenizer.get("normalizer")
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
        and not pre_tokenizer.get("add_prefix_space", True)
        and all(token.get("special") for token in tokenizer.get("added_tokens", []))
    )
