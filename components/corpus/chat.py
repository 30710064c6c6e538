"""Conversations to tokens: a chat template renders them, and what the assistant says is marked as counted.

The template is the one that the model is served with, rendered as `transformers` does: Jinja in its sandbox, without a
clock, so that the same conversation always gives the same tokens. Which characters are the assistant's say the
template's own `{% generation %}` marks; without them, what an assistant's message adds to the conversation before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.components.corpus.brought import read_brought
from holdfast.components.dataset.marks import ENDS, UNCOUNTED
from holdfast.components.spec.data import Data
from holdfast.components.spec.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template as Compiled

MAX_TEMPLATE_BYTES = 2**20
MAX_CONFIG_BYTES = 64 * 2**20
OPEN, CLOSE = "\U0010fffe", "\U0010ffff"  # around what is generated: no characters of any text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ANSWERS = ("chosen", "rejected")  # in the order of their documents
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ConversationError(ValueError):
    """A conversation that cannot be learned from, and why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may write."""

    text: str
    specials: dict[str, str]

    def dump(self) -> str:
        """As JSON: the same template always gives the same text."""
        return json.dumps({"text": self.text, "specials": self.specials}, sort_keys=True)

    @classmethod
    def parse(cls, dumped: str) -> ChatTemplate:
        """What `dump` wrote."""
        return cls(**json.loads(dumped))

    def rendered(self, conversation: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the ranges of its characters that the assistant says. Raises
        ConversationError."""
        messages, tools = conversation["messages"], conversation.get("tools")
        if GENERATION.search(self.text):
            return _unmarked(self._render(messages, tools))
        whole, spans = self._render(messages, tools), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], tools, prompt=True)
                after = self._render(messages[: index + 1], tools)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise ConversationError(
                        "the chat template writes a turn otherwise when another one follows, so nobody can tell what "
                        "the assistant says; put {% generation %} and {% endgeneration %} around it in the template"
                    )
                spans.append((len(before), len(after.rstrip())))
        return whole, spans

    def answered(self, prompt: list[Any], answer: list[Any], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The same of a prompt and the messages that answer it, all of which count. Raises ConversationError."""
        before, _ = _unmarked(self._render(prompt, tools, prompt=True))
        whole, _ = _unmarked(self._render([*prompt, *answer], tools))
        if not whole.startswith(before):
            raise ConversationError("the chat template writes a prompt otherwise when an answer follows")
        return whole, [(len(before), len(whole.rstrip()))]

    def _render(self, messages: list[Any], tools: Any, *, prompt: bool = False) -> str:
        if not self.text:
            raise ConversationError("there is no chat template to write its messages; bring one (data.chat.template)")
        try:
            return self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.specials
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise ConversationError(f"the chat template refuses it: {error}") from None

    @cached_property
    def _compiled(self) -> Compiled:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012 - as the library declares it

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller: Any) -> str:
                return f"{OPEN}{caller()}{CLOSE}"

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self.text)


class ChatEncoder:
    """Encodes conversations (as `conversation_text` writes them): each token with its marks, uint32; and pairs of
    answers (as `pair_text` does), each answer after its prompt as a document of its own."""

    def __init__(self, tokenizer_json: str, template: ChatTemplate, end_of_text: int) -> None:
        """`end_of_text` ends answers that are plain text."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template, self._end = template, end_of_text

    def encode(self, text: str) -> bytes:
        """The tokens, as little-endian bytes. The first one never counts: nothing stands before it. Raises
        ConversationError."""
        record = json.loads(text)
        if "chosen" not in record:
            return self._marked(*self._template.rendered(record))
        return b"".join(self._answer(record["prompt"], record[key], record.get("tools")) for key in ANSWERS)

    def _answer(self, prompt: Any, answer: Any, tools: Any) -> bytes:
        if not isinstance(prompt, str):
            return self._marked(*self._template.answered(prompt, answer, tools))
        return self._marked(prompt + answer, [(len(prompt), len(prompt + answer))], [self._end])

    def _marked(self, rendered: str, spans: list[tuple[int, int]], more: Sequence[int] = ()) -> bytes:
        """The tokens of a text, of which those in `spans` count, and `more` of them, which count as well."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        tokens = np.array([*encoding.ids, *more], dtype="<u4")
        begins = np.array([begin for begin, _ in encoding.offsets] + [spans[-1][0] if spans else 0] * len(more))
        counted = np.zeros(len(tokens), dtype=bool)
        for first, last in spans:
            counted |= (begins >= first) & (begins < last)
        counted[:1] = False
        if not counted.any():
            raise ConversationError("the assistant says nothing in it")
        tokens[~counted] |= np.uint32(UNCOUNTED)
        tokens[-1] |= np.uint32(ENDS)
        return tokens.tobytes()


def conversation_text(record: Any) -> str | None:
    """The conversation of a record as canonical JSON; None when it has none."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        return None
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        return None
    kept = {"messages": messages, **({"tools": record["tools"]} if record.get("tools") else {})}
    text = json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return None if OPEN in text or CLOSE in text else text


def read_template(data: Data) -> ChatTemplate:
    """The template of a spec: what `data.chat.template` names, or what lies beside the tokenizer.

    Raises MissingError or DataError, naming the field.
    """
    folder = (data.tokenizer.path or "").rpartition("/")[0]
    named = data.chat.template
    beside = f"{folder}/" if folder else ""
    raw_settings = read_brought(f"{beside}tokenizer_config.json", "data.tokenizer.path", MAX_CONFIG_BYTES, missing=None)
    settings = _json(raw_settings, f"{beside}tokenizer_config.json")
    if named is not None:
        raw = read_brought(named, "data.chat.template", MAX_CONFIG_BYTES)
        assert raw is not None
        text = _of_config(_json(raw, named)) if named.endswith(".json") else _utf8(raw, named)
    else:
        found = read_brought(f"{beside}chat_template.jinja", "data.chat.template", MAX_TEMPLATE_BYTES, missing=None)
        text = _utf8(found, "chat_template.jinja") if found is not None else _of_config(settings)
    if text is None and data.kind == "preferences" and named is None:
        text = ""  # plain texts need none
    if text is None:
        raise DataError(
            f"data.chat.template: there is no chat template in {named or beside or 'the working directory'}; name a "
            "Jinja file, or bring the chat_template.jinja or tokenizer_config.json of the tokenizer"
        )
    if len(text) > MAX_TEMPLATE_BYTES:
        raise DataError(f"data.chat.template: {len(text)} characters are too many for a chat template")
    specials = {key: value for key in SPECIALS if (value := _special(settings.get(key))) is not None}
    template = ChatTemplate(text, specials)
    try:
        template._compiled  # noqa: B018 - what does not compile is said now
    except Exception as error:  # noqa: BLE001 - the library has several
        raise DataError(f"data.chat.template: is no Jinja template: {error}") from None
    return template


def _of_config(settings: dict[str, Any]) -> str | None:
    found = settings.get("chat_template")
    if isinstance(found, list):  # several with names
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _special(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json(raw: bytes | None, name: str) -> dict[str, Any]:
    if raw is None:
        return {}
    try:
        found = json.loads(_utf8(raw, name))
    except ValueError as error:
        raise DataError(f"{name}: not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8") from None


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks around what is generated, and the ranges that lay between them."""
    plain: list[str] = []
    spans: list[tuple[int, int]] = []
    at = begin = 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            begin = at
        elif piece == CLOSE:
            spans.append((begin, at))
        else:
            plain.append(piece)
            at += len(piece)
    return "".join(plain), spans
