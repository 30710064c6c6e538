"""Field maps: the keys of a record under which a conversation, a pair or a labeled answer is found.

A preset names the keys of a common layout, and keys of the spec replace single ones. The result of a map is a record
in the standard layout, so everything after it sees one layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.corpus.chat import ConversationError, is_messages

if TYPE_CHECKING:
    from holdfast.spec.data import FieldMap

PRESETS: dict[str, dict[str, Any]] = {
    "alpaca": {"prompt": "instruction", "input": "input", "completion": "output", "system": "system"},
    "sharegpt": {
        "messages": "conversations",
        "role": "from",
        "content": "value",
        "system": "system",
        "tools": "tools",
        "roles": {
            "human": "user",
            "gpt": "assistant",
            "chatgpt": "assistant",
            "bard": "assistant",
            "bing": "assistant",
            "observation": "tool",
        },
    },
    "prompt_completion": {"prompt": "prompt", "completion": "completion", "system": "system"},
}
OF_TEMPLATES = ("tools", "documents", "chat_template_kwargs")  # read under their own names
STANDARD: dict[str, tuple[str, ...]] = {
    "text": (),
    "chat": ("messages",),
    "preferences": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}
MESSAGE_KEYS = ("messages", "prompt", "completion", "chosen", "rejected")  # values that may be lists of messages
LABELS = {"true": True, "false": False, "1": True, "0": False}


def dump_map(fields: FieldMap | None) -> str:
    """A field map of the spec as JSON, with its preset filled in. Empty for None. Equal maps give equal text."""
    if fields is None:
        return ""
    given = fields.model_dump(exclude_none=True)
    roles = given.pop("roles")
    keys = {**PRESETS.get(given.pop("preset", ""), {}), **given}
    keys["roles"] = {**keys.get("roles", {}), **roles}
    return json.dumps(keys, sort_keys=True)


@dataclass(frozen=True)
class RecordMap:
    """A field map for one kind of data."""

    keys: dict[str, str]  # the record's key of each standard one
    role: str = "role"
    content: str = "content"
    roles: dict[str, str] = field(default_factory=dict)
    chat: bool = False

    @classmethod
    def parse(cls, dumped: str, kind: str) -> RecordMap:
        """The inverse of `dump_map`. The standard layout of `kind` if that is empty."""
        keys = json.loads(dumped or "{}")
        settings = {name: keys.pop(name) for name in ("role", "content", "roles") if name in keys}
        standard = {} if kind == "chat" and keys.keys() & {"prompt", "completion"} else {k: k for k in STANDARD[kind]}
        templates = {key: key for key in OF_TEMPLATES}
        return cls({**templates, **standard, **keys}, **settings, chat=kind == "chat")

    @property
    def columns(self) -> set[str]:
        """The keys of a record that are read."""
        return set(self.keys.values())

    def in_words(self) -> str:
        """The keys of this map that are not standard, for messages."""
        renamed = [f"{key}: {name}" for key, name in self.keys.items() if key != name]
        return f" (`fields` of the source: {', '.join(renamed)})" if renamed else ""

    def apply(self, record: Any) -> Any:
        """The record in the standard layout. Raises ConversationError for values that cannot be used."""
        if not isinstance(record, dict):
            return record
        taken = {key: _without_none(record[name]) for key, name in self.keys.items() if record.get(name) is not None}
        for key in MESSAGE_KEYS:
            if key in taken:
                taken[key] = self._messages(taken[key], key)
        if isinstance(label := taken.get("label"), str | int):
            taken["label"] = LABELS.get(str(label).lower(), label)
        return self._conversation(taken) if self.chat else taken

    def _messages(self, value: Any, key: str) -> Any:
        """Messages in the standard layout, parsed if they are JSON text. Other texts stay as they are."""
        if isinstance(value, str) and (key == "messages" or value.lstrip()[:2] in ("[{", "[ ", "[\n")):
            try:
                value = json.loads(value)
            except ValueError:
                if key == "messages":
                    raise ConversationError("its messages are text that is not JSON") from None
                return value
        if not isinstance(value, list):
            return value
        return [self._message(each) for each in value]

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict) or self.role not in message:
            return message
        name = message[self.role]
        renamed = {"role": self.roles.get(name, name) if isinstance(name, str) else name}
        if self.content in message:
            renamed["content"] = message[self.content]
        rest = {key: value for key, value in message.items() if key not in (self.role, self.content)}
        return {**renamed, **rest}

    def _conversation(self, taken: dict[str, Any]) -> dict[str, Any]:
        """A conversation of a record with messages, or of one with a prompt and an answer."""
        inputs = {key: taken[key] for key in OF_TEMPLATES if key in taken}
        if "messages" in self.keys:
            messages = taken.get("messages")
        else:
            messages = self._turns(taken.get("prompt"), taken.get("completion"), taken.get("input"))
        system = taken.get("system")
        if isinstance(system, str) and system.strip() and isinstance(messages, list):
            messages = [{"role": "system", "content": system}, *messages]
        return {"messages": messages, **inputs}

    def _turns(self, prompt: Any, completion: Any, more: Any) -> Any:
        if is_messages(prompt) and is_messages(completion):
            return [*prompt, *completion]
        if not isinstance(prompt, str) or not isinstance(completion, str) or not (prompt and completion):
            return None
        question = f"{prompt}\n{more}" if isinstance(more, str) and more.strip() else prompt
        return [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]


def _without_none(value: Any) -> Any:
    """`value` without keys that have no value: a table gives every message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
