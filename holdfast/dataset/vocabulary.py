"""Facts from a `tokenizer.json` without loading the tokenizer: its size, and the bytes of text per token."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def vocabulary_size(tokenizer_json: str) -> int:
    """One more than the largest token id."""
    return 1 + max(token_ids(tokenizer_json).values())


def token_ids(tokenizer_json: str) -> dict[str, int]:
    """The id of each token, in a tokenizer with at least one. Raises DataError."""
    try:
        return _tokens(parse_json_object(tokenizer_json, "tokenizer.json"))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"tokenizer.json is not one of Hugging Face tokenizers ({error!r})") from None


def bytes_of_tokens(tokenizer_json: str, size: int) -> NDArray[np.int64]:
    """UTF-8 bytes of text per token: int64 [size]; 0 for special tokens and unused ids."""
    tokenizer = parse_json_object(tokenizer_json, "tokenizer.json")
    added = {entry["content"]: entry for entry in tokenizer.get("added_tokens", [])}
    byte_level = "ByteLevel" in _types(tokenizer.get("decoder")) | _types(tokenizer.get("pre_tokenizer"))
    lengths = np.zeros(size, dtype=np.int64)
    for token, index in _tokens(tokenizer).items():
        if token in added:
            lengths[index] = 0 if added[token].get("special") else len(token.encode())
        elif byte_level:
            lengths[index] = len(token)  # the byte-level alphabet writes each byte as one character
        elif _BYTE_TOKEN.fullmatch(token):
            lengths[index] = 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())  # SentencePiece writes a space as U+2581
    return lengths


def prepended_bytes(tokenizer_json: str, size: int) -> NDArray[np.int64]:
    """The bytes of each token that begins a document which the tokenizer adds and which are not text: int64 [size].
    All are 0 for tokenizers that add nothing."""
    tokenizer = parse_json_object(tokenizer_json, "tokenizer.json")
    added = {entry["content"] for entry in tokenizer.get("added_tokens", [])}
    lengths = np.zeros(size, dtype=np.int64)
    if prefix := _prefix(tokenizer.get("normalizer")) or _prefix(tokenizer.get("pre_tokenizer")):
        for token, index in _tokens(tokenizer).items():
            if token.startswith(prefix) and token not in added:
                lengths[index] = len(prefix.replace("\u2581", " ").encode())
    return lengths


def _prefix(component: Any) -> str:
    """The prefix that a component adds to a text, or an empty string."""
    if not isinstance(component, dict):
        return ""
    match component.get("type"):
        case "Prepend":
            return str(component.get("prepend", ""))
        case "Metaspace":
            older = "always" if component.get("add_prefix_space", True) else "never"
            scheme = component.get("prepend_scheme", older)
            return "" if scheme == "never" else str(component.get("replacement", "\u2581"))
    parts = [*component.get("normalizers", []), *component.get("pretokenizers", [])]
    return next(filter(None, map(_prefix, parts)), "")


def _tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocabulary, list):  # Unigram: [token, score]
        tokens = {entry[0]: index for index, entry in enumerate(vocabulary)}
    elif isinstance(vocabulary, dict):
        tokens = dict(vocabulary)
    else:
        raise DataError("the tokenizer has no vocabulary; bring a tokenizer.json that Hugging Face tokenizers wrote")
    tokens.update({entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])})
    if not tokens:
        raise DataError("the tokenizer's vocabulary is empty; bring another tokenizer.json")
    return tokens


def _types(component: Any) -> set[str]:
    """The types of a component and of everything in its sequences."""
    if not isinstance(component, dict):
        return set()
    parts = [*component.get("decoders", []), *component.get("pretokenizers", [])]
    return {component.get("type", "")}.union(*(_types(part) for part in parts))


# Marks of tokens in a dataset of conversations: whether a token counts in the loss, whether it ends a document, and
# whether it is part of an undesirable answer.
#
# Marks are bits above the id, in the shards and in the rows of a batch. So code that orders, reads and caches tokens
# does not depend on them. Tokens of plain text have no marks: all of them count, and a separate token ends each
# document.

UNCOUNTED = 1 << 31  # read, but not counted as a target
ENDS = 1 << 30  # the last token of its document
UNDESIRABLE = 1 << 29  # part of an answer that the model should not give
RECORD = 1 << 28  # no token, but a byte of the record that a prompt comes from, for its rewards
ID = RECORD - 1  # the bits of the id itself
NO_TOKEN = -1  # in place of the end-of-text token if marks end documents


def only_chosen(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of pairs in which only the chosen answers count: every other document, starting with the first."""
    ends = (rows[:, :-1] & ENDS) != 0
    rejected = (np.cumsum(ends, axis=1) - ends) % 2 == 1
    marked = rows.copy()
    marked[:, 1:][rejected] |= UNCOUNTED
    return marked


def only_desirable(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of labeled answers in which only the desirable ones count."""
    return np.where(rows & UNDESIRABLE != 0, rows | UNCOUNTED, rows)
