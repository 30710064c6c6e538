"""Records of a run in the store, for its readers:

- `run.json`: its metadata, written once, before any other lasting object of the run.
- `labels.json`: its tags and its note. People write them; they are no part of its identity.
"""

import json
import re
import time
from collections.abc import Iterable

from pydantic import BaseModel, Field

from holdfast.spec import Spec
from holdfast.spec.errors import MissingError, UsageError
from holdfast.spec.identity import current_versions
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, Store, layout

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}")
MAX_TAGS, MAX_NOTE = 64, 4000  # of a run; characters
TRIES = 20  # writes that lose a race


def write_run_metadata(store: Store, run_id: str, spec: Spec, dataset_id: str, salt: str) -> None:
    """Write the metadata of a run, unless it exists, and mark the run as the newest one of its name."""
    versions = current_versions()
    record = {
        "run_id": run_id,
        "name": spec.name,
        "dataset_id": dataset_id,
        "salt": salt,
        "data_plane_version": versions.data_plane,
        "generator_version": versions.generator,
        "created": time.time(),
        "spec": spec.model_dump(mode="json"),
    }
    store.put_if_absent(layout.run(run_id, "run.json"), json.dumps(record, indent=2).encode())
    mark_name(store, spec.name, run_id)


def mark_name(store: Store, name: str, run_id: str) -> None:
    """Enter a run into the index of names, as the newest one of this name. A lookup then does not read all runs."""
    if name and run_id:
        store.put(layout.named(name, run_id), b"{}")


class Labels(BaseModel, extra="forbid"):
    """The labels of a run."""

    tags: list[str] = Field(default_factory=list, max_length=MAX_TAGS)  # sorted, each once
    note: str = Field("", max_length=MAX_NOTE)


def change_labels(
    store: Store, run_id: str, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
) -> Labels:
    """Add and remove tags, and replace the note unless it is None. Returns the labels after that. Concurrent changes
    are all kept. Raises UsageError for a label that is not allowed."""
    added, removed = set(add), set(remove)
    for tag in sorted(added):
        if not TAG.fullmatch(tag):
            remedy = "use 1 to 63 letters, digits and . _ : / -, and begin with a letter, a digit or _"
            raise UsageError(f"{tag!r} is no tag", "TAG", remedy)
    if note is not None and len(note) > MAX_NOTE:
        raise UsageError(f"has {len(note):,} characters", "--note", f"use at most {MAX_NOTE:,}")
    key = layout.labels(run_id)
    for tries_left in reversed(range(TRIES)):
        try:
            data, version = store.get_versioned(key)
            found = parse_json(data, Labels, f"{store.url}/{key}")
        except MissingError:
            found, version = Labels(), None
        tags = sorted({*found.tags, *added} - removed)
        if len(tags) > MAX_TAGS:
            raise UsageError(f"the run would have {len(tags)} tags", "TAG", f"remove some; {MAX_TAGS} are allowed")
        labels = Labels(tags=tags, note=found.note if note is None else note)
        try:
            store.compare_and_swap(key, labels.model_dump_json(indent=2).encode(), version)
        except ConflictError:
            if not tries_left:
                raise
            continue
        return labels
    raise AssertionError("the last try returns or raises")
