"""A model that answers: its decoder, its tokenizer, and its chat template, from the Hugging Face layout.

Text of an answer is decoded while its tokens arrive: whole characters, and nothing behind a stop sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast.corpus.chat import ChatTemplate, ConversationError
from holdfast.corpus.model_template import find_turn_end, read_model_template
from holdfast.model.decoder import Decoder
from holdfast.model.files import Files
from holdfast.model.hugging_face import load_exported
from holdfast.rendering.process import TemplateLimitError
from holdfast.spec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_OPEN = 8  # tokens without a whole character; a character has at most four bytes
REPLACEMENT = "\ufffd"  # which a decoder writes for a part of a character


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
        assert self.template is not None
        tokens, end = self.text_ends.tokens, find_turn_end(self.template, self.tokenizer)
        return Ends(tokens if end.token is None else tokens | {end.token}, () if end.text is None else (end.text,))


class TextStream:
    """Decodes tokens one at a time. Text that may be the beginning of a stop sequence is kept back."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens: list[int] = []  # the last ones: those before `_read` are decoded, and give the next ones context
        self._read = 0
        self._kept = ""
        self.stopped = False  # a stop sequence ended the text

    def add(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        self._tokens.append(token)
        self._decode(whole=False)
        found = [at for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._kept = self._kept[: min(found)], ""
            return text
        size = len(self._kept) - self._open()
        text, self._kept = self._kept[:size], self._kept[size:]
        return text

    def finish(self) -> str:
        """The rest, after the last token."""
        self._decode(whole=True)
        text, self._kept = self._kept, ""
        return text

    def _decode(self, *, whole: bool) -> None:
        """Decode the new tokens, unless they end within a character. `whole` decodes them all the same."""
        before, after = self._tokenizer.decode(self._tokens[: self._read]), self._tokenizer.decode(self._tokens)
        is_open = after.endswith(REPLACEMENT) and len(self._tokens) - self._read < MOST_OPEN
        if len(after) > len(before) and (whole or not is_open):
            self._kept += after[len(before) :]
            self._tokens, self._read = self._tokens[self._read :], len(self._tokens) - self._read

    def _open(self) -> int:
        """The number of last characters that may begin a stop sequence."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-size:]) for stop in self._stops):
                return size
        return 0
