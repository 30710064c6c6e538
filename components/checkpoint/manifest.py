"""The manifest: everything that a checkpoint is, apart from the tensor bytes.

A full view: no manifest needs another one to be read. It carries a digest of itself, so that a damaged one is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import prod
from typing import Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.components.checkpoint.box import DTYPES, overlap
from holdfast.components.spec.errors import DataError
from holdfast.components.spec.plan import Segment

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30
_DIGEST = r"^[0-9a-f]{32}$"


class UnfitError(DataError):
    """A checkpoint that is intact and still of no use here. It is never set aside as damaged."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Record):
    """A part of a tensor, and where its bytes lie."""

    offset: tuple[int, ...]  # index of its first element in the global tensor
    shape: tuple[int, ...]
    pack: str = Field(pattern=r"^[0-9]{6,}-[0-9a-f]{32}$")
    start: int = Field(ge=0)  # bytes into the pack
    length: int = Field(ge=0)  # bytes
    digest: str = Field(pattern=_DIGEST)  # blake3 of the bytes
    codec: Literal["raw"] = "raw"


class TensorRecord(_Record):
    """A global tensor and the pieces that make it up."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"]
    pieces: tuple[Piece, ...]

    @model_validator(mode="after")
    def _covered(self) -> TensorRecord:
        elements = sum(prod(piece.shape) for piece in self.pieces)
        if elements != prod(self.shape):
            raise ValueError(f"its pieces hold {elements} of {prod(self.shape)} elements")
        for piece in self.pieces:
            if piece.length != prod(piece.shape) * DTYPES[self.dtype].itemsize:
                raise ValueError(f"the piece at {piece.offset} has {piece.length} bytes for {self.dtype} {piece.shape}")
            fits = len(piece.offset) == len(piece.shape) == len(self.shape) and all(
                low >= 0 and size >= 0 and low + size <= whole
                for low, size, whole in zip(piece.offset, piece.shape, self.shape, strict=True)
            )
            if not fits:
                raise ValueError(f"the piece at {piece.offset} of shape {piece.shape} lies outside {self.shape}")
        if _overlapping(self.pieces):  # with as many elements as the tensor, this also means a hole elsewhere
            raise ValueError("its pieces overlap")
        return self


def _overlapping(pieces: Sequence[Piece]) -> bool:
    """Whether any two pieces share an element."""
    pieces = [piece for piece in pieces if prod(piece.shape)]
    if len({(piece.offset[1:], piece.shape[1:]) for piece in pieces}) <= 1 and all(piece.shape for piece in pieces):
        spans = sorted((piece.offset[0], piece.offset[0] + piece.shape[0]) for piece in pieces)  # cut along rows only
        return any(end > start for (_, end), (start, _) in pairwise(spans))
    return any(
        overlap(one.offset, one.shape, other.offset, other.shape) is not None for one, other in combinations(pieces, 2)
    )


class Manifest(_Record):
    """One committed checkpoint."""

    version: Literal[1] = 1
    run_id: str
    dataset_id: str
    step: int = Field(ge=0)  # optimizer steps done; the data position is the same number
    attempt: int = Field(ge=0)
    created: float  # unix seconds
    layout: dict[str, Any]  # what it was written from: engine, strategy, world size
    segments: tuple[Segment, ...] = ()  # of the run up to here, each with the plan that it was computed under
    history: tuple[tuple[int, int], ...] = ()  # (after, attempt): who measured the steps above `after`; see telemetry
    random: dict[str, Any]  # the streams of randomness; keyed by step, so no generator state is needed
    scalars: dict[str, float | int]  # optimizer and schedule
    state_digest: str = Field(pattern=_DIGEST)  # of tensors and scalars, however they were cut: see `fingerprint`
    tensors: dict[str, TensorRecord]

    @property
    def fingerprint(self) -> str:
        """Of the plan that it was computed under; empty when nobody said."""
        return self.segments[-1].fingerprint if self.segments else ""

    @property
    def packs(self) -> set[str]:
        """The names of the packs that it needs."""
        return {piece.pack for record in self.tensors.values() for piece in record.pieces}

    def to_bytes(self) -> bytes:
        """The manifest as it is stored."""
        body = self.model_dump(mode="json")
        return json.dumps({**body, "digest": _digest(body)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Manifest:
        """Read a stored manifest. Raises DataError, naming `source`, for anything but an intact one."""
        try:
            body = json.loads(data)
            claimed = body.pop("digest")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{source}: the manifest is torn ({error})") from None
        if isinstance(body.get("version"), int) and body["version"] > FORMAT_VERSION:
            raise UnfitError(
                f"{source}: format version {body['version']} is newer than {FORMAT_VERSION}; upgrade Holdfast"
            )
        if claimed != _digest(body):
            raise DataError(f"{source}: the manifest does not match its own digest")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise DataError(f"{source}: the manifest is not valid: {error}") from None


def content_digest(data: bytes | memoryview) -> str:
    """The digest of tensor bytes: 128 bits of blake3, in hexadecimal."""
    return blake3(data).hexdigest(length=16)


def _digest(value: object) -> str:
    return content_digest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
