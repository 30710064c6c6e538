"""The record of a local-tier step: what a root would say apart from tensors, and what would be written with it.

Writer 0 keeps it with its part. The record contains its own digest. A record that does not match it is ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.checkpoint.manifest import content_digest
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.plan import Segment
from holdfast.store import layout


class Record(BaseModel):
    """A local-tier step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    writers: int = Field(ge=1)
    created: float  # Unix seconds
    describe: dict[str, Any]  # fields of a manifest that do not change: dataset_id, layout, random
    segments: tuple[Segment, ...] = ()
    history: tuple[tuple[int, int], ...] = ()
    scalars: dict[str, int | float] = {}
    attachments: dict[str, str] = {}  # objects that a commit would write: key -> text

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan that it was computed under; empty if unknown."""
        return self.segments[-1].fingerprint if self.segments else ""

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        body = self.model_dump_json().encode()
        return content_digest(body).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Record:
        """Read a stored record. Raises DataError for anything but an intact one."""
        stored_digest, _, body = data.partition(b"\n")
        if stored_digest != content_digest(body).encode():
            raise DataError(f"{source}: the record does not match its digest")
        try:
            return cls.model_validate(parse_json_object(body, source))
        except ValidationError as error:
            raise DataError(f"{source}: the record is not valid: {error}") from None


def record_key(run_id: str, attempt: int, step: int) -> str:
    """The key at which writer 0 keeps it."""
    return f"{layout.indexes(run_id, attempt, step)}record.json"
