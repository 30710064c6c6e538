"""The description in a root apart from its tensors: its run, step, attempt and history.

Readable without torch, as in the step that registers a model. `manifest` reads the whole of a root.
"""

from __future__ import annotations

import json
import re
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_bounded

FORMAT_VERSION = 2
MAX_ROOT_BYTES = 1 << 28


class UnfitError(DataError):
    """An intact checkpoint that cannot be used here. It is never quarantined."""


class Root(BaseModel, frozen=True):
    """The part of a root that identifies the checkpoint and its run."""

    run_id: str
    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    history: tuple[tuple[int, int], ...] = ()
    state_digest: str
    bytes_of: str = ""

    @property
    def holder(self) -> str:
        """The run under which its indexes and packs lie."""
        return self.bytes_of or self.run_id

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Root:
        """Read a stored root. Raises DataError, naming `source`, for anything but an intact one, and UnfitError for one
        of a newer Holdfast."""
        try:
            return cls.model_validate(root_body(data, source))
        except ValidationError as error:
            raise DataError(f"{source}: the manifest is not valid: {error}") from None


def root_body(data: bytes, source: str) -> dict[str, Any]:
    """The fields of a stored root without its digest, which they match. Raises as `Root.from_bytes`."""
    try:
        body = json.loads(data)
        claimed = body.pop("digest")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{source}: the manifest is torn ({error})") from None
    if claimed != body_digest(body):  # first, and alike in every version: a flipped bit must not look like a newer one
        raise DataError(f"{source}: the manifest does not match its own digest")
    if isinstance(body.get("version"), int) and body["version"] > FORMAT_VERSION:
        raise UnfitError(f"{source}: format version {body['version']} is newer than {FORMAT_VERSION}; upgrade Holdfast")
    if _stored(body, claimed) != data:  # a flipped bit in the last digit of a number may leave its value
        raise DataError(f"{source}: the manifest is not as it was written")
    return dict(body)


def root_bytes(body: dict[str, Any]) -> bytes:
    """A root as it is stored."""
    return _stored(body, body_digest(body))


def body_digest(value: object) -> str:
    """The digest of the fields of a root."""
    return blake3(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=16)


def _stored(body: dict[str, Any], digest: object) -> bytes:
    return json.dumps({**body, "digest": digest}, separators=(",", ":")).encode()


def root_data(store: Store, run_id: str, step: int) -> bytes:
    """The stored root of a checkpoint. Raises MissingError, and DataError for one that is too large to be a root."""
    key = layout.checkpoint(run_id, step)
    try:
        return read_bounded(store, key, MAX_ROOT_BYTES)
    except MissingError:
        raise MissingError(f"{key}: no such checkpoint in {store.url}") from None


def read_root(store: Store, run_id: str, step: int) -> Root:
    """The description in the root of a checkpoint. Raises MissingError, DataError if it is damaged, UnfitError if a
    newer Holdfast wrote it."""
    return root_of(root_data(store, run_id, step), run_id, step)


def root_of(data: bytes, run_id: str, step: int) -> Root:
    """Parse a stored root. Raises as `Root.from_bytes`, and DataError for the root of another checkpoint."""
    key = layout.checkpoint(run_id, step)
    root = Root.from_bytes(data, key)
    if (root.run_id, root.step) != (run_id, step):
        raise DataError(f"{key}: is the manifest of run {root.run_id} at step {root.step}")
    return root


def checkpoint_times(store: Store, run_id: str) -> dict[int, float]:
    """The steps of all committed checkpoints, oldest first, and the time of each commit (Unix seconds by the store's
    clock)."""
    times = {}
    for info in store.list(layout.run(run_id, "checkpoints/step-")):
        if match := re.search(r"/step-(\d{9,})\.json$", info.key):
            times[int(match[1])] = info.modified
    return dict(sorted(times.items()))
