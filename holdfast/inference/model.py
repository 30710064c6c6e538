"""A model that answers: its decoder, its tokenizer, and its chat template, from the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast.corpus.chat import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    ConversationError,
    specials_of,
    templates_of,
)
from holdfast.model.decoder import Decoder
from holdfast.model.files import Files, read_bytes
from holdfast.model.hugging_face import load_exported
from holdfast.rendering.process import TemplateLimitError
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBE = "an answer"  # an answer whose end shows how the template ends a turn


class PromptError(DataError):
    """A request that the model cannot read: too long, or refused by its chat template."""


@dataclass(frozen=True)
class Ends:
    """What ends an answer, in addition to its length."""

    tokens: frozenset[int]
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnsweringModel:
    """A loaded model. `template` is None for a base model, which only continues text."""

    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate | None
    turn_ends: Ends = field(default_factory=lambda: Ends(frozenset()))  # of the template

    @classmethod
    def load(cls, files: Files, device: torch.device) -> AnsweringModel:
        """Load a model to `device`, fp32. Raises MissingError and DataError."""
        decoder, tokenizer = load_exported(files, (device,))
        if decoder.score is not None:
            raise DataError(
                f"{files.where}: a model with a scalar head gives rewards and writes no text; use one that predicts "
                "tokens"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        model = cls(decoder, tokenizer, read_model_template(files))
        return model if model.template is None else replace(model, turn_ends=model._find_turn_ends())

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its answer."""
        return self.decoder.shape.context

    @property
    def text_ends(self) -> Ends:
        """What ends a text that continues a prompt."""
        end = self.decoder.end_of_text
        return Ends(frozenset({*self.decoder.stops, *([] if end is None else [end])}))

    def conversation_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a conversation, up to where the answer begins. Raises PromptError."""
        if self.template is None:
            raise PromptError("this model has no chat template; use a completion, which continues a text")
        record = {"prompt": list(messages), "record": {}, **({} if tools is None else {"tools": list(tools)})}
        return self._fitting(self._render(record), special=False)

    def text_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue. An empty text begins a new one. Raises PromptError."""
        tokens = self._fitting(text, special=True)
        if tokens:
            return tokens
        if self.decoder.end_of_text is None:
            raise PromptError("an empty prompt needs a model with an end-of-text token; give a prompt")
        return [self.decoder.end_of_text]

    def require_fit(self, tokens: Sequence[int]) -> list[int]:
        """The tokens. Raises PromptError if the context has no place for one more, or one is not in the vocabulary."""
        if len(tokens) >= self.context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, and the model's context is {self.context} with the answer; "
                "shorten it"
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.decoder.vocabulary:
            raise PromptError(f"a token of the prompt is not in the vocabulary of {self.decoder.vocabulary} tokens")
        return list(tokens)

    def _fitting(self, text: str, *, special: bool) -> list[int]:
        return self.require_fit(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def _render(self, record: Mapping[str, Any]) -> str:
        assert self.template is not None
        try:
            ((text, _, _),) = self.template.rendered(json.dumps(record, ensure_ascii=False))
        except (ConversationError, TemplateLimitError) as error:
            raise PromptError(str(error)) from None
        return text

    def _find_turn_ends(self) -> Ends:
        """What the template writes after an answer: a token, or else a text. The end of text also ends an answer."""
        tokens = self.text_ends.tokens
        messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        try:
            ending = self._render({"messages": messages}).rpartition(PROBE)[2].strip()
        except PromptError:
            return Ends(tokens)
        ids = self.tokenizer.encode(ending, add_special_tokens=False).ids
        added = self.tokenizer.get_added_tokens_decoder()
        if ids and ids[0] in added and added[ids[0]].special:
            return Ends(tokens | {ids[0]})
        return Ends(tokens, (ending,) if ending else ())


def read_model_template(files: Files) -> ChatTemplate | None:
    """The chat template of a model in the Hugging Face layout, or None. Raises DataError."""
    raw = read_bytes(files, "tokenizer_config.json", MAX_CONFIG_BYTES)
    settings = {} if raw is None else parse_json_object(raw, f"{files.where}/tokenizer_config.json", finite=False)
    templates = templates_of(settings)
    if (text := read_bytes(files, "chat_template.jinja", MAX_TEMPLATE_BYTES)) is not None:
        templates["default"] = text.decode(errors="replace")
    if "default" not in templates:
        return None
    named = {"tool_use": templates["tool_use"]} if "tool_use" in templates else {}
    return ChatTemplate(templates["default"], specials_of(settings), named, f"of {files.where}")
