"""Records of a run in the store, for its readers:

- `run.json`: its metadata, written once, before any other lasting object of the run.
- `labels.json`: its tags and its note. People write them; they are no part of its identity.
"""

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, Field

from holdfast.spec import Spec, run_id
from holdfast.spec.errors import DataError, ExitCode, HoldfastError, MissingError, UsageError
from holdfast.spec.identity import current_versions, earlier_versions
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, Store, layout
from holdfast.store.json_reading import read_json

log = logging.getLogger("holdfast.runs")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}")
MAX_TAGS, MAX_NOTE = 64, 4000  # of a run; characters
TRIES = 20  # writes that lose a race


class OtherResultsError(HoldfastError):
    """This Holdfast would begin another run instead of continuing the given one."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True)
class Maker:
    """The Holdfast that made a run, by the run's `run.json`."""

    versions: dict[str, Any]  # of the package, of the data plane and of the generator, by name; None: not recorded
    in_words: str  # what differs from this Holdfast; empty if nothing does
    other_results: bool  # whether this Holdfast computes other bits for the run, and so gives it another id

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Maker":
        """The maker of a run with this `run.json`."""
        here = _versions()
        made = {name: record.get(name) for name in here}
        differing = {name for name, value in made.items() if value is not None and value != here[name]}
        spec = record.get("spec")
        items = spec.items() if isinstance(spec, dict) else ()
        sections = {name: value for name, value in items if isinstance(value, dict)}
        grpo = sections.get("training", {}).get("grpo")
        has_server = isinstance(grpo, dict) and grpo.get("server") is not None
        if sections.get("data", {}).get("kind") != "prompts" or has_server:  # its ranks generate no answers
            differing.discard("generator_version")
        words = [f"{_WORDS[name]} {made[name]} (here {here[name]})" for name in here if name in differing]
        has_script = sections.get("train", {}).get("script") is not None
        return cls(made, ", ".join(words), bool(differing - {"holdfast_version"}) and not has_script)

    @classmethod
    def of_run(cls, store: Store, identity: str) -> "Maker":
        """The maker of a run in a store; without a readable `run.json` nothing is known to differ."""
        try:
            return cls.of(read_json(store, layout.run(identity, "run.json"), dict[str, Any]))
        except (MissingError, DataError):
            return cls.of({})


_WORDS = {"holdfast_version": "Holdfast", "data_plane_version": "data plane", "generator_version": "generator"}


@cache
def _installed() -> str:
    return version("holdfast")


def _versions() -> dict[str, Any]:
    """The versions of this Holdfast, as `run.json` records them."""
    versions = current_versions()
    return {
        "holdfast_version": _installed(),
        "data_plane_version": versions.data_plane,
        "generator_version": versions.generator,
    }


def find_earlier_run(store: Store, spec: Spec, dataset_id: str, salt: str, first_weights: str) -> str:
    """The id of the run of the same inputs under earlier versions of Holdfast's results; empty without one."""
    for versions in earlier_versions(spec):
        identity = run_id(spec, dataset_id, salt, first_weights, versions)
        if store.stat(layout.run(identity, "run.json")) is not None:
            return identity
    return ""


def earlier_run_note(earlier: str) -> str:
    """The sentence about a run of the same spec that an older Holdfast made."""
    return f"run {earlier} of the same spec was made by an older Holdfast, whose results differ; this is a new run"


def write_run_metadata(
    store: Store, identity: str, spec: Spec, dataset_id: str, salt: str, first_weights: str = ""
) -> None:
    """Write the metadata of a run, unless it exists, and mark the run as the newest one of its name. A run of the same
    inputs under earlier versions of Holdfast is named in it, and in the log."""
    key = layout.run(identity, "run.json")
    earlier = "" if store.stat(key) is not None else find_earlier_run(store, spec, dataset_id, salt, first_weights)
    if earlier:
        log.warning("%s", earlier_run_note(earlier))
    record = {
        "run_id": identity,
        "name": spec.name,
        "dataset_id": dataset_id,
        "salt": salt,
        **_versions(),
        "earlier_run": earlier,
        "created": time.time(),
        "spec": spec.model_dump(mode="json"),
    }
    store.put_if_absent(key, json.dumps(record, indent=2).encode())
    mark_name(store, spec.name, identity)


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
