"""The chat template of a model in the Hugging Face layout, and how it ends an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.corpus.chat import (
    LEGACY,
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    ConversationError,
    specials_of,
    templates_of,
    with_legacy_tokens,
)
from holdfast.model.files import Files, read_bytes
from holdfast.rendering.process import TemplateLimitError
from holdfast.spec.json_parsing import parse_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBE = "an answer"  # an answer whose end shows how the template ends a turn


@dataclass(frozen=True)
class TurnEnd:
    """What a template writes after an answer: a token, or else a text. Both None: nothing."""

    token: int | None = None
    text: str | None = None


def read_model_template(files: Files) -> ChatTemplate | None:
    """The chat template of a model in the Hugging Face layout, or None. Raises DataError."""
    settings = _read_object(files, "tokenizer_config.json")
    templates = templates_of(settings)
    if (text := read_bytes(files, "chat_template.jinja", MAX_TEMPLATE_BYTES)) is not None:
        templates["default"] = text.decode(errors="replace")
    if "default" not in templates:
        return None
    named = {"tool_use": templates["tool_use"]} if "tool_use" in templates else {}
    specials = specials_of(with_legacy_tokens(settings, lambda: _read_object(files, LEGACY)))
    return ChatTemplate(templates["default"], specials, named, f"of {files.where}")


def _read_object(files: Files, name: str) -> dict[str, Any]:
    raw = read_bytes(files, name, MAX_CONFIG_BYTES)
    return {} if raw is None else parse_json_object(raw, f"{files.where}/{name}", finite=False)


def find_turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> TurnEnd:
    """What the template writes after an answer. Nothing if it refuses a question and an answer."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        ((text, _, _),) = template.rendered(json.dumps({"messages": messages}))
    except (ConversationError, TemplateLimitError):
        return TurnEnd()
    ending = text.rpartition(PROBE)[2].strip()
    ids = tokenizer.encode(ending, add_special_tokens=False).ids
    added = tokenizer.get_added_tokens_decoder()
    if ids and ids[0] in added and added[ids[0]].special:
        return TurnEnd(token=ids[0])
    return TurnEnd(text=ending or None)
