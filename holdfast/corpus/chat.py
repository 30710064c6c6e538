"""Conversations to tokens: a chat template renders them, and the assistant's text is marked as counted.

The template is the one for serving the model, rendered as in `transformers`, in `holdfast/rendering`. It has no clock,
so the same conversation always gives the same tokens. The template's `{% generation %}` marks select the assistant's
characters. Without marks, they are the text that an assistant's message adds to the conversation before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.corpus.encode import LossyError, exact_offsets, is_lossless, require_same
from holdfast.corpus.files import read_user_file
from holdfast.dataset.vocabulary import ENDS, ID, RECORD, UNCOUNTED, UNDESIRABLE
from holdfast.rendering.chat import CLOSE, OPEN, Rendered
from holdfast.rendering.process import Template, TemplateRefusedError
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_value

MAX_TEMPLATE_BYTES = 2**20
MAX_CONFIG_BYTES = 64 * 2**20
SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LEGACY = "special_tokens_map.json"
TEMPLATE_NAMES = ("default", "tool_use")  # the names that `apply_chat_template` chooses from
# Arguments of `apply_chat_template` that a record must not set in `chat_template_kwargs`.
RESERVED = tuple(
    """
    conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    sanitize_control_tokens
    """.split()
)


class ConversationError(ValueError):
    """A conversation that cannot be used for training, and the reason."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, its special tokens, and the other templates of the same tokenizer by name."""

    text: str
    specials: dict[str, str]
    named: dict[str, str] = field(default_factory=dict)
    name: str = field(default="", compare=False)  # its location, for messages

    def dump(self) -> str:
        """The template as JSON. The same template always gives the same text."""
        fields = {"text": self.text, "specials": self.specials, **({"named": self.named} if self.named else {})}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def parse(cls, dumped: str, name: str = "") -> ChatTemplate:
        """The inverse of `dump`. `name` is for messages."""
        return cls(**json.loads(dumped), name=name)

    def rendered(self, record: str) -> list[Rendered]:
        """Render a record from `conversation_text` or `pair_text`: its text, the character ranges of the assistant,
        and whether it is plain text without a template. A pair gives one result for each answer after its prompt.
        Raises ConversationError, and TemplateLimitError for a template that exceeds its limits."""
        try:
            texts: list[Rendered] = self._program.run(record)
        except TemplateRefusedError as error:
            raise ConversationError(str(error)) from None
        return texts

    def compile(self) -> None:
        """Compile all templates. Raises TemplateRefusedError and TemplateLimitError."""
        self._program.run("")

    @cached_property
    def _program(self) -> Template:
        name = f"the chat template {self.name}".rstrip()
        return Template(name, "chat", self.text, self.specials, self.named)


class ChatEncoder:
    """Encodes conversations (from `conversation_text`) as tokens with their marks, uint32. Of pairs (from
    `pair_text`) and labeled answers (from `labeled_text`), each answer after its prompt becomes a document. A prompt
    (from `prompt_text`) is followed by the bytes of its record."""

    def __init__(self, tokenizer_json: str, template: ChatTemplate, end_of_text: int) -> None:
        """`end_of_text` ends plain-text answers."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(exact_offsets(tokenizer_json))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._lossless = is_lossless(json.loads(tokenizer_json))
        self._template, self._end = template, end_of_text

    def encode(self, text: str) -> bytes:
        """The tokens, as little-endian bytes. The first one never counts, because nothing precedes it. Raises
        ConversationError, and LossyError if the tokens do not decode to the text."""
        ends: dict[bool, list[int]] = {False: [], True: [self._end]}
        if (fields := (record := json.loads(text)).get("record")) is not None:
            ((prompt, _, _),) = self._template.rendered(text)
            return self._prompt(prompt, {"prompt": record["prompt"], **fields})
        encoded = b"".join(
            self._marked(part, spans, ends[plain]) for part, spans, plain in self._template.rendered(text)
        )
        if record.get("label") is False:
            encoded = (np.frombuffer(encoded, dtype="<u4") | np.uint32(UNDESIRABLE)).tobytes()
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _prompt(self, rendered: str, record: dict[str, Any]) -> bytes:
        """The tokens of a prompt, which do not count, and the bytes of its record."""
        ids = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        if not self._lossless:
            require_same(rendered, self.decode(ids), strict=False)
        if not ids:
            raise ConversationError("its prompt has no tokens")
        raw = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        words = np.concatenate((np.array(ids, dtype="<u4"), np.frombuffer(raw, np.uint8).astype("<u4") | RECORD))
        words |= np.uint32(UNCOUNTED)
        words[-1] |= np.uint32(ENDS)
        return words.astype("<u4").tobytes()

    def _marked(self, rendered: str, spans: list[tuple[int, int]], more: Sequence[int] = ()) -> bytes:
        """The tokens of a text, followed by `more`. Tokens with a character in `spans` count, and so do those of
        `more`."""
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        if not self._lossless:
            require_same(rendered, self.decode(encoding.ids), strict=False)
        tokens = np.array([*encoding.ids, *more], dtype="<u4")
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        is_counted = np.ones(len(tokens), dtype=bool)
        is_counted[: len(begins)] = False
        for first, last in spans:
            if first < last:
                is_counted[: len(begins)] |= (ends > first) & (begins < last)
        is_counted[:1] = False
        if not is_counted.any():
            raise ConversationError("the assistant says nothing in it")
        tokens[~is_counted] |= np.uint32(UNCOUNTED)
        tokens[-1] |= np.uint32(ENDS)
        return tokens.tobytes()


def ending_of_turns(tokenizer_json: str, template: ChatTemplate) -> str | None:
    """The special token that ends the assistant's text in a small conversation, or None if the template has none."""
    question, answer = {"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine."}
    encoder = ChatEncoder(tokenizer_json, template, 0)
    try:
        raw = encoder.encode(json.dumps({"messages": [question, answer]}))
    except (ConversationError, LossyError):
        return None
    marked = np.frombuffer(raw, dtype="<u4")
    added = {entry["id"]: entry["content"] for entry in json.loads(tokenizer_json).get("added_tokens") or []}
    for token in reversed((marked[(marked & UNCOUNTED) == 0] & ID).tolist()):
        if token in added or encoder.decode([token]).strip():
            return added.get(token)
    return None


def conversation_text(record: Any) -> str | None:
    """The conversation of a record as JSON, with keys in the record's order, or None without one. Raises
    ConversationError for values that a template cannot take."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not is_messages(messages):
        return None
    return dumped({"messages": messages, **template_inputs(record)})


def prompt_text(record: Any) -> str | None:
    """The prompt of a record (`prompt`, or `messages`) and its other keys for rewards as JSON, or None without a
    prompt. Raises ConversationError for values that a template cannot take."""
    if not isinstance(record, dict):
        return None
    name = "prompt" if "prompt" in record else "messages"
    prompt: Any = record.get(name)
    if not _answers(prompt):
        return None
    inputs = template_inputs(record)
    fields = {key: value for key, value in record.items() if key not in ("prompt", name, *inputs)}
    return dumped({"prompt": prompt, **inputs, "record": fields})


def is_messages(value: Any) -> bool:
    """Whether a value is a non-empty list of messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)


def dumped(record: dict[str, Any]) -> str | None:
    """A record as JSON. Keys keep their order, because templates write them in it. None if it contains the marks of
    answers."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return None if OPEN in text or CLOSE in text else text


def template_inputs(record: dict[str, Any]) -> dict[str, Any]:
    """The template inputs of a record other than messages: `tools`, `documents` and `chat_template_kwargs`, parsed
    if they are JSON text. Raises ConversationError for values that `apply_chat_template` refuses."""
    inputs: dict[str, Any] = {}
    for key in ("tools", "documents"):
        value = _parsed(record.get(key), key)
        if value is None:
            continue
        if isinstance(value, list):
            value = [_parsed(item, key) for item in value]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ConversationError(f"its '{key}' are no list of JSON objects")
        inputs[key] = value
    options = _parsed(record.get("chat_template_kwargs"), "chat_template_kwargs")
    if options is not None:
        if not isinstance(options, dict):
            raise ConversationError("its 'chat_template_kwargs' are no JSON object")
        if reserved := sorted(options.keys() & set(RESERVED)):
            raise ConversationError(f"its 'chat_template_kwargs' set {reserved[0]!r}, which is no option of a template")
        if options:
            inputs["chat_template_kwargs"] = options
    return inputs


def _parsed(value: Any, key: str) -> Any:
    """`value`, parsed if it is JSON text. None if that is blank."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ConversationError(f"its '{key}' are text that is not JSON ({error})") from None


def read_template(data: Data) -> ChatTemplate:
    """The template of a spec: the one in `data.chat.template`, or the one next to the tokenizer. Raises MissingError
    or DataError that names the field."""
    folder = (data.tokenizer.path or "").rpartition("/")[0]
    given = data.chat.template
    place = f"{folder}/" if folder else ""
    settings = read_settings(f"{place}tokenizer_config.json", "data.tokenizer.path")
    if given is not None:
        raw = read_user_file(given, "data.chat.template", MAX_CONFIG_BYTES)
        assert raw is not None
        templates = templates_of(_json(raw, given)) if given.endswith(".json") else {"default": _utf8(raw, given)}
    else:
        templates = templates_next_to(place, settings)
    text = templates.pop("default", None)
    named_templates = {name: text_of_name for name, text_of_name in templates.items() if name in TEMPLATE_NAMES}
    if text is None and (named_templates or (data.kind in ("preferences", "unpaired", "prompts") and given is None)):
        text = ""  # plain texts need none, and those with tools use another one
    if text is None:
        raise DataError(
            f"data.chat.template: there is no chat template in {given or place or 'the working directory'}; name a "
            "Jinja file, or bring the chat_template.jinja or tokenizer_config.json of the tokenizer"
        )
    if (size := max(map(len, (text, *named_templates.values())))) > MAX_TEMPLATE_BYTES:
        raise DataError(f"data.chat.template: {size} characters are too many for a chat template")
    specials = specials_of(
        with_legacy_tokens(settings, lambda: read_settings(f"{place}{LEGACY}", "data.tokenizer.path"))
    )
    template = ChatTemplate(text, specials, named_templates, template_name(data))
    try:
        template.compile()
    except TemplateRefusedError as error:
        raise DataError(f"data.chat.template: is no Jinja template: {error}") from None
    return template


def template_name(data: Data) -> str:
    """The location of a spec's template, for messages."""
    return data.chat.template or f"of {data.tokenizer.path or 'the working directory'}"


def read_settings(path: str, named: str) -> dict[str, Any]:
    """A JSON document next to the path of the spec's field `named`. Empty if it does not exist. Raises DataError."""
    return _json(read_user_file(path, named, MAX_CONFIG_BYTES, missing=None), path)


def templates_next_to(folder: str, settings: dict[str, Any]) -> dict[str, str]:
    """The templates next to a tokenizer, by name. `settings` is its tokenizer_config.json."""
    return _of_files(folder) or templates_of(settings)


def _of_files(folder: str) -> dict[str, str]:
    """The templates in separate files, by name."""
    places = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    files = {
        name: read_user_file(f"{folder}{path}", "data.chat.template", MAX_TEMPLATE_BYTES, missing=None)
        for name, path in places.items()
    }
    return {name: _utf8(raw, places[name]) for name, raw in files.items() if raw is not None}


def templates_of(settings: dict[str, Any]) -> dict[str, str]:
    """The templates of a tokenizer_config.json, by name."""
    templates = settings.get("chat_template")
    if isinstance(templates, list):  # several named templates
        templates = {
            template.get("name"): template.get("template") for template in templates if isinstance(template, dict)
        }
    if not isinstance(templates, dict):
        templates = {"default": templates}
    return {
        name: template for name, template in templates.items() if isinstance(name, str) and isinstance(template, str)
    }


def with_legacy_tokens(settings: dict[str, Any], read_legacy: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A tokenizer_config.json with the special tokens of an older special_tokens_map.json, which `transformers` reads
    if the former lists no added tokens."""
    return settings if "added_tokens_decoder" in settings else {**settings, **read_legacy()}


def specials_of(settings: dict[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json, by the names that templates read: the standard ones, and those of
    the model, such as `image_token`."""
    own = {key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)}
    extra = settings.get("extra_special_tokens")
    named = {**own, **(extra if isinstance(extra, dict) else {}), **{key: settings.get(key) for key in SPECIALS}}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: content for key, content in contents.items() if isinstance(content, str)}


def _json(raw: bytes | None, name: str) -> dict[str, Any]:
    if raw is None:
        return {}
    value = parse_json_value(_utf8(raw, name), name, "bring another one", finite=False)
    return value if isinstance(value, dict) else {}


def _utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8") from None


# Preference pairs: a prompt with a chosen and a rejected answer, in the format of `trl`.
#
# All three are texts, or all three are lists of messages. A missing prompt is the common beginning of both answers. The
# same applies to a text prompt with message answers, as in UltraFeedback. Prompt messages that both answers repeat are
# kept once.


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


def labeled_text(record: Any) -> str | None:
    """The prompt, the answer and the label of a record as JSON, or None without them. Raises ConversationError for
    values that a template cannot take, and for a label that is not true or false."""
    if not isinstance(record, dict):
        return None
    prompt: Any = record.get("prompt")
    completion: Any = record.get("completion")
    if type(prompt) is not type(completion) or not _answers(prompt) or not _answers(completion):
        return None
    label = record.get("label")
    if not isinstance(label, bool):
        raise ConversationError(f"its 'label' is {json.dumps(label)[:40]}; write true or false")
    return dumped({"prompt": prompt, "completion": completion, "label": label, **template_inputs(record)})


def _answers(value: Any) -> bool:
    """Whether a value is a non-empty text or list of messages."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def _common(chosen: Any, rejected: Any) -> int:
    """The position at which the answers differ. A space before it belongs to them, because most word tokens begin
    with one."""
    parted = (at for at, (left_item, other) in enumerate(zip(chosen, rejected, strict=False)) if left_item != other)
    length = next(parted, min(len(chosen), len(rejected)))
    return length - 1 if length and isinstance(chosen, str) and chosen[length - 1] == " " else length
