"""Preference pairs: a prompt with a chosen and a rejected answer, in the format of `trl`.

All three are texts, or all three are lists of messages. A missing prompt is the common beginning of both answers. The
same applies to a text prompt with message answers, as in UltraFeedback. Prompt messages that both answers repeat are
kept once.
"""

from __future__ import annotations

from typing import Any

from holdfast.corpus.chat import dumped, is_messages, template_inputs


def pair_text(record: Any) -> str | None:
    """The prompt and the answers of a record as JSON, with keys in the record's order, or None without a pair.
    Raises ConversationError for values that a template cannot take."""
    if not isinstance(record, dict):
        return None
    chosen: Any = record.get("chosen")
    rejected: Any = record.get("rejected")
    if type(chosen) is not type(rejected) or not _answers(chosen) or not _answers(rejected):
        return None
    prompt: Any = record.get("prompt")
    if prompt is None or isinstance(prompt, str) != isinstance(chosen, str):
        begin = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:begin], chosen[begin:], rejected[begin:]
    if not all(map(_answers, (prompt, chosen, rejected))):
        return None
    size = len(prompt)
    if (
        isinstance(prompt, list)
        and chosen[:size] == rejected[:size] == prompt
        and min(len(chosen), len(rejected)) > size
    ):
        chosen, rejected = chosen[size:], rejected[size:]
    return dumped({"prompt": prompt, "chosen": chosen, "rejected": rejected, **template_inputs(record)})


def _answers(value: Any) -> bool:
    """Whether a value is a non-empty text or list of messages."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def _common(chosen: Any, rejected: Any) -> int:
    """The position at which the answers differ. A space before it belongs to them, because most word tokens begin
    with one."""
    parted = (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    found = next(parted, min(len(chosen), len(rejected)))
    return found - 1 if found and isinstance(chosen, str) and chosen[found - 1] == " " else found
