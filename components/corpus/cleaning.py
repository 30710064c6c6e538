"""What is done to a document before it is tokenised, and why it may be dropped."""

from __future__ import annotations

import unicodedata
from typing import Literal

from holdfast.components.spec.data import Cleaning

Reason = Literal["too_short", "too_long", "repetitive"]


def clean(text: str, rules: Cleaning) -> tuple[str, Reason | None]:
    """The normalised text, and why the document is dropped (None: it stays)."""
    if rules.unicode != "none" and not text.isascii():
        text = unicodedata.normalize(rules.unicode, text)
    if len(text) < rules.min_characters:
        return text, "too_short"
    if len(text) > rules.max_characters:
        return text, "too_long"
    if rules.max_repetition < 1 and repetition(text) > rules.max_repetition:
        return text, "repetitive"
    return text, None


def repetition(text: str) -> float:
    """The share of the non-empty lines that repeat an earlier line."""
    lines = [line for raw in text.splitlines() if (line := raw.strip())]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0
