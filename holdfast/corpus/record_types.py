"""Records of sources: what a reader takes from each of them, and the document or the flaw that it gives."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from holdfast.corpus.chat import ConversationError, conversation_text, labeled_text, pair_text, prompt_text
from holdfast.corpus.field_maps import PRESETS, RecordMap
from holdfast.corpus.files import LFS_ADVICE, LFS_POINTER, NOT_TEXT
from holdfast.runtime.secrets import redact

EXCERPT = 60  # characters
DETAIL = 500  # characters of a flaw, which a part of a unit stores


@dataclass(frozen=True)
class Flaw:
    """The reason why a record is no document of the dataset."""

    reason: str  # one word, the key of the count
    detail: str  # a sentence about the record
    excerpt: str = ""  # the beginning of its text

    def __post_init__(self) -> None:
        """Make the detail safe to store and to print: it may quote names and keys of foreign data."""
        object.__setattr__(self, "detail", printable(self.detail)[:DETAIL])


Record = str | Flaw | None  # None: a blank line
Kind = Literal["text", "chat", "preferences", "unpaired", "prompts"]

# Reasons of `data.cleaning`. Any other reason is a fault.
FILTERS = ("too_short", "too_long", "repetitive", "filtered", "contaminated")
READERS: dict[Kind, tuple[Callable[[Any], str | None], str]] = {
    "chat": (conversation_text, "conversation under 'messages', a list of {role, content}"),
    "unpaired": (labeled_text, "answer under 'prompt', 'completion' and 'label', texts or lists of {role, content}"),
    "prompts": (prompt_text, "prompt under 'prompt' or 'messages', a text or a list of {role, content}"),
    "preferences": (pair_text, "pair under 'prompt', 'chosen' and 'rejected', texts or lists of {role, content}"),
}


@dataclass(frozen=True)
class Reading:
    """What is taken from the records of a source."""

    max_characters: int
    text_field: str = "text"
    kind: Kind = "text"
    fields: str = ""  # the source's field map, as JSON; empty without one

    @cached_property
    def map(self) -> RecordMap:
        """The keys of a record that are read."""
        return RecordMap.parse(self.fields, self.kind)

    @property
    def line_limit(self) -> int:
        """Bytes of the longest record as JSON: a character may be two escapes of six bytes, and other keys 1 MiB."""
        return 12 * self.max_characters + 2**20

    def columns(self, names: list[str]) -> list[str]:
        """The columns of a table that are read, given all its `names`."""
        wanted = {self.text_field} if self.kind == "text" else self.map.columns
        return [name for name in names if name in wanted]


def json_document(raw: bytes, reading: Reading) -> Record:
    """The document of a line of JSON."""
    if raw.startswith(LFS_POINTER):
        return Flaw(NOT_TEXT, LFS_ADVICE)
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Flaw("undecodable", undecodable(error))
    except (ValueError, RecursionError) as error:
        return Flaw("not_json", f"is not JSON ({error})", shown(raw))
    return document_of(record, reading, raw, mapped=bool(reading.fields))


def document_of(record: Any, reading: Reading, raw: bytes = b"", *, mapped: bool = True) -> Record:
    """The document of a parsed record. `raw` are its first bytes, for messages. With `mapped` the field map applies,
    which also takes the values of tables: columns without a value, and JSON as text."""
    kind = reading.kind
    if kind == "text":
        value = record.get(reading.text_field) if isinstance(record, dict) else None
        return text_of(value, reading.text_field, raw, partial(_keys, record) if raw else str)
    excerpt_ = shown(raw or repr(record)[: 8 * EXCERPT].encode(errors="replace"))
    try:
        value = READERS[kind][0](reading.map.apply(record) if mapped else record)
    except ConversationError as error:
        return Flaw("bad_conversation", str(error), excerpt_)
    except (ValueError, RecursionError) as error:
        return Flaw("not_json", f"is not JSON ({error})", excerpt_)
    if value is None:
        keys = _keys(record) + _preset_for(record, reading) if raw else ""  # a table is read in part
        return Flaw("no_text", f"has no {READERS[kind][1]}{reading.map.in_words()}{keys}", excerpt_)
    return text_of(value, kind, raw)


def _keys(record: Any) -> str:
    """The keys that a record has, for messages."""
    if not isinstance(record, dict):
        return "; it is no JSON object"
    return f"; it has {excerpt(', '.join(map(repr, record))) or 'no keys'}"


def _preset_for(record: Any, reading: Reading) -> str:
    """The preset of a field map that reads a record, for messages."""
    if reading.kind != "chat" or reading.fields or not isinstance(record, dict):
        return ""
    for name, keys in PRESETS.items():
        if {keys[key] for key in ("messages", "prompt", "completion") if key in keys} <= record.keys():
            return f"; use `fields: {name}` of the source"
    return ""


def text_of(value: Any, text_field: str, raw: bytes = b"", keys: Callable[[], str] = str) -> Record:
    """`value` if it is text that can be encoded. `keys` says which ones its record has, for messages."""
    if not isinstance(value, str):
        return Flaw(
            "no_text", f"has no text under {text_field!r}{keys()}; check `text_field` of the source", shown(raw)
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return Flaw("undecodable", f"has a lone surrogate at character {error.start}")
    return value


def shown(raw: bytes) -> str:
    """The beginning of a record, for people."""
    return excerpt(raw[: 8 * EXCERPT].decode(errors="replace"))


def excerpt(text: str) -> str:
    """The beginning of a text, for people: on one line, and without secrets."""
    redacted = redact(text[: 4 * EXCERPT]).encode(errors="replace").decode()
    return "".join(char if char.isprintable() else " " for char in redacted[:EXCERPT]).strip()


def printable(text: str) -> str:
    """Foreign text on one line, with escapes for controls and for what is not Unicode."""
    return text if text.isprintable() else repr(text)[1:-1]


def undecodable(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are not UTF-8."""
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); convert it to UTF-8"
