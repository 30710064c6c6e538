"""Chat templates as `transformers` renders them: Jinja in its sandbox, without a clock. Runs in the child process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.rendering.limits import RefusedError, require_length

if TYPE_CHECKING:
    from jinja2 import Template as Jinja

OPEN, CLOSE = "\U0010fffe", "\U0010ffff"  # marks around generated text: characters that no text contains
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one key of a message; the first one is standard
ANSWERS = ("chosen", "rejected", "completion")  # in the order of their documents
# A text, the ranges of its counted characters, and whether it is plain: not written by a template.
Rendered = tuple[str, list[tuple[int, int]], bool]


@dataclass(frozen=True)
class ChatProgram:
    """A chat template, the special tokens that it may write, and the tokenizer's other templates by name."""

    text: str
    specials: dict[str, str]
    named: dict[str, str] = field(default_factory=dict)

    def run(self, request: str) -> list[Rendered]:
        """Render the record in `request`; without a record, compile all templates. Raises RefusedError and
        TooLongError."""
        if not request:
            for text in (self.text, *self.named.values()):
                self._compiled(text)
            return []
        record = json.loads(request)
        if "record" in record:
            return [self._prompt(record)]
        answers = [key for key in ANSWERS if key in record]
        return [self._answered(record, key) for key in answers] if answers else [self._rendered(record)]

    def _rendered(self, conversation: dict[str, Any]) -> Rendered:
        """The text of a conversation, and the ranges of the assistant's characters."""
        messages = conversation["messages"]
        full, spans = self._render(messages, conversation), list[tuple[int, int]]()
        if self._chosen(conversation).has_marks:
            text, spans = _unmarked(self._render(messages, conversation, marks=True))
            if text != full:
                raise RefusedError(
                    "the chat template changes text after {% generation %} marked it; put the marks around the "
                    "finished text"
                )
            return full, spans, False
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], conversation, prompt=True)
                after = self._render(messages[: index + 1], conversation)
                if not (after.startswith(before) and full.startswith(after)):
                    raise RefusedError(
                        "the chat template writes a turn differently when another one follows, so it is unknown what "
                        "the assistant says; put {% generation %} and {% endgeneration %} around it in the template"
                    )
                spans.append((len(before), len(after.rstrip())))
        return full, spans, False

    def _answered(self, record: dict[str, Any], key: str) -> Rendered:
        """The same for a record's prompt and its answer under `key`. The whole answer counts."""
        if isinstance(prompt := record["prompt"], str):
            return prompt + record[key], [(len(prompt), len(prompt) + len(record[key]))], True
        before = self._render(record["prompt"], record, prompt=True)
        full = self._render([*record["prompt"], *record[key]], record)
        if not full.startswith(before):
            raise RefusedError("the chat template writes a prompt otherwise when an answer follows")
        return full, [(len(before), len(full.rstrip()))], False

    def _prompt(self, record: dict[str, Any]) -> Rendered:
        """The text of a prompt, up to where an answer begins."""
        prompt = record["prompt"]
        if isinstance(prompt, str):
            return prompt, [], True
        return self._render(prompt, record, prompt=True), [], False

    def _render(self, messages: list[Any], record: dict[str, Any], *, prompt: bool = False, marks: bool = False) -> str:
        """The text of `apply_chat_template`. With `marks`, OPEN and CLOSE enclose generated text."""
        template = self._chosen(record)
        variables = {
            "documents": record.get("documents"),
            **self.specials,
            **record.get("chat_template_kwargs", {}),
            "messages": [_message(message) for message in messages],
            "tools": record.get("tools"),
            "add_generation_prompt": prompt,
        }
        template.marks[:] = (OPEN, CLOSE) if marks else ("", "")
        try:
            text = template.template.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise RefusedError(f"the chat template refuses it: {error}") from None
        return require_length(text)

    def _chosen(self, record: dict[str, Any]) -> _Compiled:
        """The template that `apply_chat_template` selects: `tool_use`, if it exists, for records with tools."""
        text = self.named.get("tool_use", self.text) if record.get("tools") is not None else self.text
        if not text:
            raise RefusedError("there is no chat template to write its messages; bring one (data.chat.template)")
        return self._compiled(text)

    def _compiled(self, text: str) -> _Compiled:
        compiled = self._cache.get(text)
        return compiled if compiled is not None else self._cache.setdefault(text, _compile(text))

    @cached_property
    def _cache(self) -> dict[str, _Compiled]:
        return {}


@dataclass(frozen=True)
class _Compiled:
    """A template, and whether it marks generated text. `marks` are written around that text."""

    template: Jinja
    has_marks: bool
    marks: list[str]


def _compile(text: str) -> _Compiled:
    """Compile a template for the environment of `transformers`, without a clock."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    marks, lines = ["", ""], list[int]()

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as the library declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            lines.append(line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(text)
    return _Compiled(template, bool(lines), marks)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `apply_chat_template` passes it to the template: without null keys, and with its reasoning under the
    names that templates read."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks around generated text, and the ranges between them."""
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
