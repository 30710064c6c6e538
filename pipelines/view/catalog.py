"""The runs in a store, as their objects tell it: nothing is remembered anywhere else.

Promises one listing for all runs, and that a name, an id or the beginning of an id finds one run or says why not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.components.spec import Spec
from holdfast.components.spec.errors import DataError, HoldfastError, MissingError
from holdfast.components.store import Store, layout

RUNS = "runs/"


@dataclass
class RunRecord:
    """What the store knows about one run."""

    run_id: str
    started: float = 0.0  # unix seconds: the oldest object's
    changed: float = 0.0  # unix seconds: the newest object's, but for those of whoever keeps, reads or collects it
    attempts: int = 0
    checkpoints: list[int] = field(default_factory=list)  # steps
    described: dict[str, Any] = field(default_factory=dict)  # run.json
    parent: dict[str, Any] = field(default_factory=dict)  # parent.json: the run and the step that it was rewound to
    result: dict[str, Any] | None = None  # result.json
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
    verdict: dict[str, Any] | None = None
    verdict_key: str = ""
    registration: dict[str, Any] | None = None
    submission: dict[str, Any] = field(default_factory=dict)  # backend.json

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the run; empty before its first attempt."""
        spec = self.described.get("spec")
        return spec if isinstance(spec, dict) else {}

    def whole_spec(self) -> Spec | None:
        """The spec, checked; None before the first attempt, and for one that another version wrote."""
        with suppress(ValueError, HoldfastError):
            return Spec.model_validate(self.spec) if self.spec else None
        return None

    def known_spec(self, store: Store) -> Spec:
        """The same. Raises MissingError where there is none."""
        if (spec := self.whole_spec()) is None:
            raise MissingError(f"run {self.run_id}: its spec is not in {store.url}, or is another version's")
        return spec

    @property
    def name(self) -> str:
        """The name in the spec, or what the exit handler called a run that failed before its first attempt."""
        return str(self.spec.get("name", "") or self.summary.get("name", "") or self.submission.get("name", ""))

    @property
    def dataset_id(self) -> str:
        """The dataset that the run trains on."""
        return str(self.described.get("dataset_id", ""))

    @property
    def steps(self) -> int:
        """The steps that the spec asks for; 0 if that is not known yet."""
        return int(self.spec.get("training", {}).get("steps", 0))

    @property
    def step(self) -> int:
        """The last step that is safe in the store."""
        if self.result is not None:
            return int(self.result.get("step", 0))
        return max(self.checkpoints, default=0)

    @property
    def loss(self) -> float | None:
        """The training loss at the end, in nats a token."""
        return None if self.result is None else self.result.get("loss")

    @property
    def word(self) -> str:
        """The verdict's word; empty before there is one."""
        return "" if self.verdict is None else str(self.verdict.get("word", ""))

    @property
    def state(self) -> str:
        """One word or two for a table."""
        if self._running:
            return "running"
        if self.registration is not None:
            return "registered"
        if self.word in ("", "blessed") and self.stopped:
            return str(self.stopped["status"])
        if self.verdict is not None:
            return self.word.replace("_", " ")
        begun = "unfinished" if self.checkpoints else "begun"
        return begun if self.result is None else "trained"

    @property
    def stopped(self) -> dict[str, Any]:
        """What the exit handler told of the newest submission, if that failed or was cancelled; else empty."""
        told = self.summary if self.summary.get("status") in ("failed", "cancelled") else {}
        return told if told.get("ended", 0.0) >= self.submission.get("submitted", 0.0) else {}

    def as_json(self) -> dict[str, Any]:
        """What a script wants of a run."""
        return {
            "run_id": self.run_id, "name": self.name, "state": self.state, "dataset_id": self.dataset_id,
            "parent": self.parent, "step": self.step, "steps": self.steps, "loss": self.loss, "verdict": self.word,
            "state_digest": (self.result or {}).get("state_digest", ""), "reason": self.stopped.get("reason", ""),
            "version": self.model_version, "attempts": self.attempts, "checkpoints": sorted(self.checkpoints),
            "backend": self.submission.get("backend", ""), "started": self.started, "changed": self.changed,
        }  # fmt: skip

    @property
    def _running(self) -> bool:
        """Whether a process of this machine works on it."""
        if self.submission.get("backend") != "local":
            return False
        from holdfast.pipelines.backends.record import read_record

        record = read_record(self.submission)
        return record is not None and record.alive

    @property
    def model_version(self) -> str:
        """`name/version` of the registered model; empty if there is none."""
        if self.registration is None:
            return ""
        return f"{self.registration.get('model')}/{self.registration.get('version')}"


def all_runs(store: Store) -> list[RunRecord]:
    """All runs in the store, newest first."""
    found = {record.run_id: record for record in _read(store, RUNS)}
    shown = (record for record in found.values() if _worked_on(store, record) not in found.keys() - {record.run_id})
    return sorted(shown, key=lambda record: record.changed, reverse=True)


def _worked_on(store: Store, record: RunRecord) -> str:
    """The run that the steps of a submission work on, where nothing but the submission is known of this one: another
    than was thought where it was submitted, if their machines have other sources."""
    from holdfast.pipelines.backends.record import as_it_ran, read_record

    submitted = read_record(record.submission) if record.submission and not record.described else None
    return record.run_id if submitted is None else as_it_ran(store, submitted).identity


def read_run(store: Store, run_id: str, verdict_key: str = "", registration_key: str = "") -> RunRecord | None:
    """One run; None if the store has nothing of it. Of several verdicts and registrations, those with the given keys,
    or without a key the newest."""
    records = list(_read(store, layout.run(run_id), verdict_key, registration_key))
    return records[0] if records else None


def find_run(store: Store, wanted: str) -> RunRecord:
    """The run whose id begins with `wanted`, or the newest one of that name. Raises MissingError."""
    records = all_runs(store)
    if not records:
        raise MissingError(f"{store.url}: has no runs yet; start one with `holdfast run examples/quickstart.yaml`")
    matching = [record for record in records if record.run_id.startswith(wanted)]
    if len(matching) > 1:
        raise MissingError(f"{wanted!r}: names {len(matching)} runs: {_ids(matching)}; write more of the id")
    named = [record for record in records if record.name == wanted]
    if found := matching or named[:1]:
        return found[0]
    raise MissingError(f"{wanted!r}: no run in {store.url} has that id or name; `holdfast runs` lists: {_ids(records)}")


def _ids(records: list[RunRecord]) -> str:
    shown = ", ".join(record.run_id for record in records[:5])
    return shown + (f" and {len(records) - 5} more" if len(records) > 5 else "")


def _read(store: Store, prefix: str, verdict_key: str = "", registration_key: str = "") -> Iterable[RunRecord]:
    records: dict[str, RunRecord] = {}
    newest: dict[tuple[str, str], tuple[float, str]] = {}  # (run, folder) -> (modified, key) of its newest record
    exact = {"evaluations": verdict_key, "registrations": registration_key}
    for info in store.list(prefix):
        run_id, _, name = info.key.removeprefix(RUNS).partition("/")
        record = records.setdefault(run_id, RunRecord(run_id, started=info.modified))
        record.started = min(record.started, info.modified)
        if not name.startswith(_HOUSEKEEPING):
            record.changed = max(record.changed, info.modified)
        folder, _, file = name.partition("/")
        stem, _, suffix = file.rpartition(".")
        if folder == "attempts" and stem.isdigit():
            record.attempts += 1
        elif folder == "checkpoints" and (step := re.fullmatch(r"step-(\d+)", stem)):
            record.checkpoints.append(int(step[1]))
        elif folder in exact and suffix == "json" and stem.startswith(exact[folder]):
            newest[run_id, folder] = max(newest.get((run_id, folder), (0.0, "")), (info.modified, info.key))
        elif name in _FILES:
            _FILES[name](record, _json(store, info.key))
    for (run_id, folder), (_, key) in newest.items():
        value = _json(store, key)
        if folder == "evaluations":
            records[run_id].verdict = value
            records[run_id].verdict_key = key.rsplit("/", 1)[1].removesuffix(".json")
        else:
            records[run_id].registration = value
    return records.values()


_HOUSEKEEPING = ("collector.json", "audits/", "checkpoints/pins/", "checkpoints/readers/")


def _described(record: RunRecord, value: dict[str, Any]) -> None:
    record.described = value


def _parent(record: RunRecord, value: dict[str, Any]) -> None:
    record.parent = value


def _result(record: RunRecord, value: dict[str, Any]) -> None:
    record.result = value


def _summary(record: RunRecord, value: dict[str, Any]) -> None:
    record.summary = value


def _submission(record: RunRecord, value: dict[str, Any]) -> None:
    record.submission = value


_FILES: dict[str, Callable[[RunRecord, dict[str, Any]], None]] = {
    "run.json": _described,
    "parent.json": _parent,
    "result.json": _result,
    "summary.json": _summary,
    "backend.json": _submission,
}


def _json(store: Store, key: str) -> dict[str, Any]:
    try:
        value = json.loads(store.get(key))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{store.url}/{key}: is damaged ({error}); delete it, and run its spec again") from None
    return value if isinstance(value, dict) else {}
