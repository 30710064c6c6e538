"""Preferences: a prompt with a chosen and a rejected answer, as `trl` reads them.

All three are texts, or all three are lists of messages. Without a prompt it is what both answers begin with; likewise
where it is a text and they are messages, as UltraFeedback has it. Messages of the prompt that both answers repeat stand
once.
"""

from __future__ import annotations

import json
from typing import Any


def pair_text(record: Any) -> str | None:
    """The prompt and the answers of a record as canonical JSON; None when it has none."""
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
    kept = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if record.get("tools"):
        kept["tools"] = record["tools"]
    return json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _answers(value: Any) -> bool:
    """Whether it is a text or a list of messages, and not empty."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)
    return isinstance(value, str) and bool(value)


def _common(chosen: Any, rejected: Any) -> int:
    """Where the answers part. A space before that belongs to them, because most tokens of words begin with one."""
    parted = (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    found = next(parted, min(len(chosen), len(rejected)))
    return found - 1 if found and isinstance(chosen, str) and chosen[found - 1] == " " else found
