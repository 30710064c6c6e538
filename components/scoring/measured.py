"""The figures of a model on held-out text. Needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, and able to carry NaN through JSON."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Measured(Record):
    """The figures of a model on held-out text."""

    loss: float  # mean cross-entropy in nats a token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # of the text's UTF-8
    tokens: int  # targets scored
    text_bytes: int  # UTF-8 bytes of the text that they stand for
