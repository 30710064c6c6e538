"""Requests and responses of OpenAI's HTTP API: the part that a text model answers.

Fields that would change an answer and are not implemented are refused. Other unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, field_validator, model_validator

MOST_MESSAGES = 4096
MOST_CHOICES = 16
MOST_STOPS = 4
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # fields, and the values that change nothing
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
}


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool | None = None


class AnswerRequest(BaseModel, extra="allow", frozen=True):
    """The fields that both kinds of requests share."""

    model: str = Field(max_length=500)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: tuple[Stop, ...] = Field((), max_length=MOST_STOPS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> AnswerRequest:
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise ValueError(f"{name} is not implemented; leave it out")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The limit of an answer in tokens; None for the rest of the context."""
        return self.max_completion_tokens or self.max_tokens


class TextPart(BaseModel):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel, extra="allow", frozen=True):
    """A message of a conversation. Fields that a template may read, such as `tool_calls`, are passed to it."""

    role: str = Field(min_length=1, max_length=64)
    content: str | tuple[TextPart, ...] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text."""
        text = self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`."""

    messages: tuple[Message, ...] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: tuple[dict[str, Any], ...] | None = Field(None, max_length=256)


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`. A list of prompts gives `n` answers to each."""

    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...] = ""
    echo: Literal[False] | None = None

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each prompt: a text or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return (prompt,)
        if all(isinstance(one, int) for one in prompt):
            return (prompt,) if prompt else ("",)  # type: ignore[return-value]
        return prompt  # type: ignore[return-value]


class AnswerText(BaseModel):
    """The text of one choice."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None


def choice(kind: str, index: int, answer: AnswerText, *, first: bool = True, chunk: bool = False) -> dict[str, Any]:
    """A choice of a response, or of a part of a stream (`chunk`)."""
    shared = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
    if kind == "text_completion":
        return {**shared, "text": answer.text}
    if not chunk:
        return {**shared, "message": {"role": "assistant", "content": answer.text, "refusal": None}}
    delta = {"role": "assistant"} if first else {}
    return {**shared, "delta": {**delta, **({"content": answer.text} if answer.text or first else {})}}


def usage(prompt: int, written: int) -> dict[str, int]:
    """Tokens of a request."""
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def problem(message: str, kind: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
