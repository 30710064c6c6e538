"""Cleaning of a document before tokenization, and reasons to drop it.

Of a conversation or a pair, only the texts of messages are checked and normalized, never the JSON around them. Tools,
tool calls and tool results are data and stay unchanged.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.corpus.record_types import Flaw, Kind, excerpt
from holdfast.spec.data import Cleaning

TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message with its text
DATA_ROLES = ("tool", "function", "ipython")  # roles of messages that a program wrote


def clean(text: str, rules: Cleaning, kind: Kind = "text") -> str | Flaw:
    """The normalized document (canonical JSON for conversations and pairs), or the reason to drop it."""
    if kind == "text":
        text = normalised(text, rules)
        return filtered([text], rules) or text
    record = json.loads(text)
    if rules.unicode != "none" and not text.isascii():
        _rewrite(record, lambda value: normalised(value, rules))
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))  # keys keep their order
    return filtered(list(texts(record)), rules) or text


def normalised(text: str, rules: Cleaning) -> str:
    """`text` in the Unicode form of the rules."""
    return text if rules.unicode == "none" or text.isascii() else unicodedata.normalize(rules.unicode, text)


def texts(record: Any) -> Iterator[str]:
    """The texts of a conversation or a pair, in order."""
    values: list[str] = []
    _rewrite(record, lambda value: values.append(value) or value)  # type: ignore[func-returns-value]
    yield from values


def _rewrite(record: Any, change: Callable[[str], str]) -> None:
    """Replace each text of a conversation or a pair by `change` of it."""
    for key in ("messages", "prompt", "chosen", "rejected", "completion"):
        value = record.get(key)
        if isinstance(value, str):
            record[key] = change(value)
        for message in value if isinstance(value, list) else ():
            if message["role"] not in DATA_ROLES:
                _rewrite_message(message, change)


def _rewrite_message(message: dict[str, Any], change: Callable[[str], str]) -> None:
    for key in TEXTS:
        value = message.get(key)
        if isinstance(value, str):
            message[key] = change(value)
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] = change(part["text"])


def filtered(found: Sequence[str], rules: Cleaning) -> Flaw | None:
    """The reason to drop a document of these texts, or None to keep it."""
    size = sum(map(len, found))
    if size < rules.min_characters:
        detail = f"has {size} characters, fewer than data.cleaning.min_characters = {rules.min_characters}"
        return Flaw("too_short", detail, excerpt("".join(found)))
    if size > rules.max_characters:
        detail = f"has {size} characters, more than data.cleaning.max_characters = {rules.max_characters}"
        return Flaw("too_long", detail, excerpt(found[0]))
    if rules.max_repetition < 1 and (share := repetition("\n".join(found))) > rules.max_repetition:
        limit = f"data.cleaning.max_repetition = {rules.max_repetition}"
        return Flaw("repetitive", f"repeats {share:.0%} of its lines, more than {limit}", excerpt(found[0]))
    return None


def repetition(text: str) -> float:
    """The share of non-empty lines that repeat an earlier line."""
    lines = [line for raw in text.splitlines() if (line := raw.strip())]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0
