"""The record of one run, from its objects in the store alone.

A run costs a few requests, regardless of its number of saves, and one for each verdict and registration. An unreadable
object hides only itself: the record has the reason in `unreadable`.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat

from holdfast.scoring import newest_record
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.store import ObjectInfo, Store, layout
from holdfast.store.json_reading import read_json
from holdfast.telemetry.run_metadata import Labels, Maker

PAGE = 1000  # objects per listing request


@dataclass
class RunRecord:
    """The store's data about one run."""

    run_id: str
    started: float = 0.0  # unix seconds of the oldest object
    changed: float = 0.0  # unix seconds of the newest object, without housekeeping objects
    attempts: int = 0
    checkpoints: list[int] = field(default_factory=list)  # steps
    described: dict[str, Any] = field(default_factory=dict)  # run.json
    parent: dict[str, Any] = field(default_factory=dict)  # parent.json: run and step of the fork
    result: dict[str, Any] | None = None  # result.json
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
    verdict: dict[str, Any] | None = None
    verdict_key: str = ""
    registration: dict[str, Any] | None = None
    submission: dict[str, Any] = field(default_factory=dict)  # backend.json
    tags: list[str] = field(default_factory=list)  # labels.json
    note: str = ""
    unreadable: list[str] = field(default_factory=list)  # its unreadable records, with the reasons

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the run; empty before its first attempt."""
        spec = self.described.get("spec")
        return spec if isinstance(spec, dict) else {}

    def whole_spec(self) -> Spec | None:
        """The validated spec; None before the first attempt, and for one of another version."""
        with suppress(ValueError, HoldfastError):
            return Spec.model_validate(self.spec) if self.spec else None
        return None

    def known_spec(self, store: Store) -> Spec:
        """The validated spec. Raises MissingError without one."""
        if (spec := self.whole_spec()) is None:
            raise MissingError(f"run {self.run_id}: its spec is not in {store.url}, or is another version's")
        return spec

    @property
    def name(self) -> str:
        """The name in the spec, otherwise in the exit handler's summary or in the submission."""
        return str(self.spec.get("name", "") or self.summary.get("name", "") or self.submission.get("name", ""))

    @property
    def dataset_id(self) -> str:
        """The dataset that the run trains on."""
        return str(self.described.get("dataset_id", ""))

    @property
    def has_damaged_verdict(self) -> bool:
        """Whether one of the verdicts that were looked for cannot be read."""
        return any("/evaluations/" in reason for reason in self.unreadable)

    @property
    def maker(self) -> Maker:
        """The Holdfast that made it."""
        return Maker.of(self.described)

    @property
    def is_script(self) -> bool:
        """Whether a training script made it."""
        section = self.spec.get("train")
        return isinstance(section, dict) and section.get("script") is not None

    @property
    def is_evaluated(self) -> bool:
        """Whether steps after training score and register its model."""
        evaluation = self.spec.get("evaluation")
        settings = evaluation if isinstance(evaluation, dict) else {}
        return not self.is_script or bool(settings.get("command") or settings.get("metrics"))

    @property
    def steps(self) -> int:
        """The number of steps in the spec. Of a script that has ended, its own number; 0 before."""
        if self.is_script:
            return self.step if self.result is not None else 0
        training = self.spec.get("training")
        steps = training.get("steps", 0) if isinstance(training, dict) else 0
        return steps if isinstance(steps, int) else 0

    @property
    def step(self) -> int:
        """The last step that the store holds."""
        if self.result is not None:
            return int(self.result.get("step", 0))
        return max(self.checkpoints, default=0)

    @property
    def loss(self) -> float | None:
        """The final training loss, in nats per token."""
        return None if self.result is None else self.result.get("loss")

    @property
    def word(self) -> str:
        """The outcome of the verdict; empty without one."""
        return "" if self.verdict is None else str(self.verdict.get("word", ""))

    @property
    def state(self) -> str:
        """The state as one or two words for a table."""
        if self._running:
            return "running"
        if self.registration is not None:
            return "registered"
        if self.word in ("", "blessed") and self.stopped:
            return str(self.stopped["status"])
        if self.verdict is not None:
            return self.word.replace("_", " ")
        label = "unfinished" if self.checkpoints else "begun"
        return label if self.result is None else "trained"

    @property
    def stopped(self) -> dict[str, Any]:
        """The exit handler's summary of the newest submission, if that failed or was cancelled; otherwise empty."""
        summary = self.summary if self.summary.get("status") in ("failed", "cancelled") else {}
        return summary if summary.get("ended", 0.0) >= self.submission.get("submitted", 0.0) else {}

    def as_json(self) -> dict[str, Any]:
        """The run for scripts."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "state": self.state,
            "dataset_id": self.dataset_id,
            **self.maker.versions,
            "other_results": self.maker.other_results,
            "earlier_run": str(self.described.get("earlier_run", "")),
            "parent": self.parent,
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss,
            "verdict": self.word,
            "state_digest": (self.result or {}).get("state_digest", ""),
            "reason": self.stopped.get("reason", ""),
            "version": self.model_version,
            "attempts": self.attempts,
            "checkpoints": sorted(self.checkpoints),
            "backend": self.submission.get("backend", ""),
            "tags": self.tags,
            "note": self.note,
            "started": self.started,
            "changed": self.changed,
            "unreadable": self.unreadable,
        }

    @property
    def _running(self) -> bool:
        """Whether a process of this machine works on it."""
        if not self.submission.get("host"):  # only runs of a machine name one
            return False
        from holdfast.pipelines.backends.record import read_record

        record = read_record(self.submission)
        return record is not None and record.newest_alive.alive

    @property
    def model_version(self) -> str:
        """`name/version` of the registered model; empty without one."""
        if self.registration is None:
            return ""
        return f"{self.registration.get('model')}/{self.registration.get('version')}"


def read_run(store: Store, run_id: str, verdict_key: str = "", registration_key: str = "") -> RunRecord | None:
    """Read one run; None if the store has none. `verdict_key` and `registration_key` choose among several records.

    Of several, the newest one by their contents counts. The times of objects change when a store is copied.
    """
    objects = _objects_of(store, run_id)
    if not objects:
        return None
    record = RunRecord(run_id, started=min(info.modified for info in objects))
    chosen: dict[str, list[str]] = {"evaluations": [], "registrations": []}  # keys of the records in a folder
    exact = {"evaluations": verdict_key, "registrations": registration_key}
    files: dict[str, str] = {}
    for info in objects:
        name = info.key.removeprefix(layout.run(run_id))
        if not name.startswith(_HOUSEKEEPING):
            record.changed = max(record.changed, info.modified)
        folder, _, file = name.partition("/")
        stem, _, suffix = file.rpartition(".")
        if folder == "attempts" and stem.isdigit():
            record.attempts += 1
        elif folder == "checkpoints" and (step := re.fullmatch(r"step-(\d+)", stem)):
            record.checkpoints.append(int(step[1]))
        elif folder in exact and suffix == "json" and stem.startswith(exact[folder]):
            chosen[folder].append(info.key)
        elif name in _FILES:
            files[name] = info.key
    for name, key in files.items():
        _FILES[name](record, _value(store, key, record, _MODELS[name]))
    key, verdict = _newest(store, chosen["evaluations"], record, _Verdict)
    if verdict:
        record.verdict, record.verdict_key = verdict, key.rsplit("/", 1)[1].removesuffix(".json")
    record.registration = _newest(store, chosen["registrations"], record, _Registration)[1] or None
    return record


def _newest(store: Store, keys: Iterable[str], record: RunRecord, model: type[BaseModel]) -> tuple[str, dict[str, Any]]:
    """The key and the value of the newest readable record; both empty without one."""
    read = ((key, _value(store, key, record, model)) for key in keys)
    return newest_record(one for one in read if one[1])


def _objects_of(store: Store, run_id: str) -> list[ObjectInfo]:
    """The objects that describe a run; all its objects if they fit in one listing page."""
    first = list(islice(store.list(layout.run(run_id)), PAGE))
    if len(first) < PAGE:
        return first
    folder_listings = [store.list(layout.run(run_id, folder)) for folder in _FOLDERS]
    infos_by_key = {
        info.key: info
        for infos in [*folder_listings, [store.stat(layout.run(run_id, name)) for name in _FILES]]
        for info in infos
        if info is not None
    }
    return list(({info.key: info for info in first} | infos_by_key).values())


_HOUSEKEEPING = ("collector.json", "labels.json", "audits/", "checkpoints/pins/", "checkpoints/readers/")
_FOLDERS = ("attempts/", "checkpoints/step-", "evaluations/", "registrations/")


class _Part(BaseModel, extra="allow"):
    """The validated part of a record. All other fields stay unchanged."""


class _EvaluationSection(_Part):
    prompts: list[Any] | None = None


class _SpecPart(_Part):
    data: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    evaluation: _EvaluationSection | None = None


class _Described(_Part):
    dataset_id: str = ""
    spec: _SpecPart | None = None


class _Parent(_Part):
    run_id: str
    step: int


class _Result(_Part):
    step: int = Field(ge=0)
    loss: FiniteFloat | None = None
    state_digest: str = ""


class _Summary(_Part):
    name: str = ""
    status: str = ""
    reason: str = ""
    ended: FiniteFloat = 0.0


class _Submission(_Part):
    name: str = ""
    backend: str = ""
    submitted: FiniteFloat = 0.0


class _Settings(_Part):
    answers: int = 1


class _Verdict(_Part):
    word: str
    reasons: list[Any] = []
    metrics: dict[str, int | float | Literal["NaN", "Infinity", "-Infinity"]] = {}
    settings: _Settings = _Settings()


class _Registration(_Part):
    model: str
    version: int


def _value(store: Store, key: str, record: RunRecord, model: type[BaseModel]) -> dict[str, Any]:
    """A record of the run; empty if it cannot be read, with the reason in `unreadable`."""
    try:
        return read_json(store, key, model).model_dump(exclude_unset=True)
    except MissingError:
        return {}
    except DataError as error:
        record.unreadable.append(str(error))
        return {}


def _described(record: RunRecord, value: dict[str, Any]) -> None:
    record.described = value


def _parent(record: RunRecord, value: dict[str, Any]) -> None:
    record.parent = value


def _result(record: RunRecord, value: dict[str, Any]) -> None:
    record.result = value or None


def _summary(record: RunRecord, value: dict[str, Any]) -> None:
    record.summary = value


def _submission(record: RunRecord, value: dict[str, Any]) -> None:
    record.submission = value


def _labels(record: RunRecord, value: dict[str, Any]) -> None:
    record.tags, record.note = value.get("tags", []), value.get("note", "")


_FILES: dict[str, Callable[[RunRecord, dict[str, Any]], None]] = {
    "run.json": _described,
    "parent.json": _parent,
    "result.json": _result,
    "summary.json": _summary,
    "backend.json": _submission,
    "labels.json": _labels,
}
_MODELS: dict[str, type[BaseModel]] = {
    "run.json": _Described,
    "parent.json": _Parent,
    "result.json": _Result,
    "summary.json": _Summary,
    "backend.json": _Submission,
    "labels.json": Labels,
}
