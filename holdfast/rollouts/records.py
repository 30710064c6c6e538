"""Records of generated answers in the store: one object for each lot of a batch of answers.

A record is created before a gradient reads it, and never replaced. Its key has the digest of the weights that generated
it and of everything else that determines its tokens, so a resumed run finds its own answers and no others. Rewards of
a found record are used as they are, because a reward may have timed out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3
from pydantic import BaseModel, Field

from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_bounded

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 64 * 2**20  # of a record
REMEDY = "delete it, and the run generates these answers again"


class RecordPart(BaseModel, extra="forbid", frozen=True):
    """A part of a record, without unknown fields."""


class Answer(RecordPart):
    """One answer of the model."""

    tokens: list[int] = Field(min_length=1)
    ending: Literal["stop", "length"]
    entropy: float | None  # mean over its tokens, in nats; None if a server generated it
    rewards: list[float]  # in the order of the spec
    errors: list[str]  # why a reward is that of `on_failure`; empty if it is not
    reward: float  # the weighted sum
    replies: list[tuple[int, int]] = []  # the ranges of tokens that the environment wrote
    environment_error: str = ""  # why the environment failed, which ended the answer


class Unit(RecordPart):
    """The answers to one prompt."""

    prompt: int  # its number in the training split
    place: int  # in the training sequence, which repeats prompts
    answers: list[Answer] = Field(min_length=1)

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [answer.tokens for answer in self.answers]


class LotRecord(RecordPart):
    """The units of a lot."""

    format_version: Literal[2] = 2
    step: int  # the first step that learns from them, from 1
    lot: int
    policy: str  # digest of the weights
    units: list[Unit] = Field(min_length=1)

    def dump(self) -> bytes:
        """The bytes of the record, with their digest. The same record always gives the same bytes."""
        content = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()
        digest = blake3(content).hexdigest()
        return b'{"content_digest":"' + digest.encode() + b'","record":' + content + b"}\n"

    @property
    def tokens(self) -> list[list[list[int]]]:
        """The tokens of each answer to each prompt."""
        return [unit.tokens for unit in self.units]


class _StoredRecord(RecordPart):
    content_digest: str  # of the record's bytes
    record: LotRecord


def parse_record(raw: bytes | str, source: str) -> LotRecord:
    """Parse a record. Raises DataError, naming `source`, if it is damaged or its content has another digest."""
    stored = parse_json(raw, _StoredRecord, source, REMEDY)
    data = raw.encode() if isinstance(raw, str) else raw
    if stored.record.dump() != data:
        raise DataError(f"{source}: has not the content of its digest {stored.content_digest:.16}; {REMEDY}")
    return stored.record


def record_key(run_id: str, step: int, lot: int, policy: str, generator: Mapping[str, Any]) -> str:
    """The key of a lot. `generator` is what else determines its tokens."""
    decisive = json.dumps([policy, generator], sort_keys=True, separators=(",", ":"))
    return layout.rollout(run_id, step, f"{lot:05d}-{blake3(decisive.encode()).hexdigest()[:24]}.json")


def logprobs_key(run_id: str, step: int, policy: str, words: Tensor) -> str:
    """The key of the log-probabilities of a batch of answers. Other answers of the same weights have another key."""
    answers = blake3(words.numpy().tobytes()).hexdigest()
    return layout.rollout(run_id, step, f"logprobs-{policy[:24]}-{answers[:24]}.fp32")


def find_record(store: Store, key: str) -> LotRecord | None:
    """The record, or None if it does not exist. Raises DataError for a damaged one."""
    try:
        raw = read_bounded(store, key, MAX_BYTES)
    except MissingError:
        return None
    return parse_record(raw, f"{store.url}/{key}")


def records_of_step(store: Store, run_id: str, step: int) -> Iterator[LotRecord]:
    """The records of a batch of answers, by lot. After a changed plan there may be several for a lot: those of the
    weights that generated most recently come last."""
    infos = list(store.list(layout.rollout(run_id, step)))
    for info in sorted(infos, key=lambda info: (info.key.rpartition("/")[2][:5], info.modified)):
        if info.key.endswith(".json") and (record := find_record(store, info.key)) is not None:
            yield record


def recorded_steps(store: Store, run_id: str) -> list[int]:
    """The steps that have records, in order."""
    prefix = layout.rollouts(run_id)
    return sorted(int(name) for name in store.folders(prefix) if name.isdecimal())
