"""The root manifest: the whole description of a checkpoint, apart from the tensor bytes and their places.

Writing it is the commit. It names the tensors and, by digest, the indexes (or the nodes above them) that locate their
bytes. So its size depends on neither the number of writers nor that of pieces. It is a full view: no other object is
needed to know what the checkpoint is. It carries its own digest, so that damage is detected.
"""

from __future__ import annotations

from typing import Any, Literal

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError, model_validator

from holdfast.checkpoint.catalogue import TensorInfo, require_shape
from holdfast.checkpoint.root import root_body, root_bytes
from holdfast.checkpoint.tree import Entry, require_entries
from holdfast.spec.errors import DataError
from holdfast.spec.plan import Segment

_DIGEST = r"^[0-9a-f]{32}$"


class _Record(BaseModel, extra="forbid", frozen=True):
    """A part of a manifest."""


class Base(_Record):
    """Frozen weights, which are no part of a checkpoint because they are not trained."""

    location: str  # as `model.init_from` has it
    digest: str  # digest of its content


class Manifest(_Record):
    """One committed checkpoint."""

    version: Literal[2] = 2
    run_id: str
    dataset_id: str
    step: int = Field(ge=0)  # optimizer steps done; the data position is the same number
    attempt: int = Field(ge=0)
    created: float  # Unix seconds
    layout: dict[str, Any]  # what it was written from: engine, strategy, world size
    segments: tuple[Segment, ...] = ()  # those of the run up to here, each with the plan that it was computed under
    history: tuple[tuple[int, int], ...] = ()  # (after, attempt): the attempt of the steps above `after`; see telemetry
    base: Base | None = None  # the frozen weights that the tensors are adapters to
    random: dict[str, Any]  # the streams of randomness; keyed by step, so no generator state is needed
    scalars: dict[str, float | int]  # optimizer and schedule
    state_digest: str = Field(pattern=_DIGEST)  # digest of tensors and scalars, for any layout: see `fingerprint`
    tensors: dict[str, TensorInfo]  # in the order of their names
    indexes: tuple[Entry, ...]  # entries of the writers, or of nodes above them
    writers: int = Field(ge=1)
    bytes_of: str = ""  # the run whose indexes and packs these are; empty: its own. See `fork`

    @model_validator(mode="after")
    def _sound(self) -> Manifest:
        if list(self.tensors) != sorted(self.tensors):
            raise ValueError("the tensors are not in the order of their names")
        for name, info in self.tensors.items():
            require_shape(name, info.shape)
        require_entries(self.indexes, self.tensors)
        return self

    @property
    def holder(self) -> str:
        """The run under which its indexes and packs lie."""
        return self.bytes_of or self.run_id

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan that it was computed under; empty if unknown."""
        return self.segments[-1].fingerprint if self.segments else ""

    @property
    def fresh(self) -> int:
        """Bytes that were written for it; earlier packs hold the rest."""
        return sum(entry.fresh for entry in self.indexes)

    def to_bytes(self) -> bytes:
        """The manifest as it is stored."""
        return root_bytes(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Manifest:
        """Read a stored manifest. Raises DataError, naming `source`, for anything but an intact one."""
        body = root_body(data, source)
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise DataError(f"{source}: the manifest is not valid: {error}") from None


def content_digest(data: bytes | memoryview) -> str:
    """The digest of tensor bytes: 128 bits of blake3, in hexadecimal."""
    return blake3(data).hexdigest(length=16)
