"""Fork of a run: a new run that begins from a checkpoint of another, optionally with changes.

No tensor is copied. The same fork is the same run, and it can resume where the first one ran. `checkpoint/fork` handles
the bytes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pydantic import BaseModel

from holdfast.checkpoint.fork import fork_checkpoint
from holdfast.code.resolve import is_submitted, keep_submitted
from holdfast.pipelines.backends.record import Record, find_record, find_submission
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.spec import Spec, dump_spec, run_id
from holdfast.spec.errors import MissingError, Problem, SpecError
from holdfast.spec.training import KEEPING
from holdfast.store import Store
from holdfast.telemetry.run_metadata import write_run_metadata


@dataclass(frozen=True)
class ForkedRun:
    """A run that begins from a checkpoint of another run."""

    run_id: str
    salt: str  # for `holdfast run SPEC`
    parent: str
    step: int
    state_digest: str


def fork_run(store: Store, parent: RunRecord, step: int, overrides: Sequence[str] = ()) -> ForkedRun:
    """Create a run from the checkpoint of `parent` at `step`, with the parent's spec and `overrides`.

    Also records how `holdfast resume` continues it. A spec with code can be resumed where the parent's was submitted.
    Raises SpecError for a change that the state does not allow, and
    MissingError for a missing checkpoint or a run that was never trained.
    """
    if not parent.spec:
        raise MissingError(f"run {parent.run_id}: {store.url} has no spec of it: it was never trained")
    parent_spec = Spec.model_validate(parent.spec)
    spec = parent_spec.with_overrides(overrides)
    if spec.train.script is None:  # the session of a script compares the state when it restores
        _require_same_state(parent_spec, spec, step)
    salt, dataset_id = f"rewound-{parent.run_id}-{step}", _dataset_id(parent, parent_spec, spec)
    weights = _weights(spec)
    identity = run_id(spec, dataset_id, salt, weights)
    digest = fork_checkpoint(store, parent.run_id, step, identity)
    write_run_metadata(store, identity, spec, dataset_id, salt, weights)
    if find_record(store, identity) is None:
        submitted = find_submission(store, parent.run_id, parent_spec)
        record = _record(store, submitted or find_record(store, parent.run_id), spec, identity, salt)
        record.write(store)
        if submitted is not None and is_submitted(submitted.request.executed):
            keep_submitted(record.request.executed)
    return ForkedRun(identity, salt, parent.run_id, step, digest)


# Fields that the state depends on, so a fork cannot change them: the reason and the remedy.
_OF_THE_STATE = {
    "model": ("is another one than that of the run, whose weights it would begin with", "leave `model` as it is"),
    "training.lora": (
        "is another one than that of the run, whose checkpoint holds its trained weights or adapters and no others",
        "leave `training.lora` as it is, or export the run and begin a new one with model.init_from",
    ),
    "data.tokenizer": (
        "is another one than that of the run, whose weights know its tokens",
        "leave `data.tokenizer` as it is",
    ),
    "data.kind": (
        "is another one than that of the run, whose past was trained and counted as the other",
        "leave it as it is, or export the run and begin a new one with model.init_from",
    ),
}


def _require_same_state(before: Spec, spec: Spec, step: int) -> None:
    problems = []
    for field, (reason, remedy) in _OF_THE_STATE.items():
        problems += [Problem(name, value, reason, remedy) for name, value in _changed(before, spec, field)]
    if spec.data.tokenizer.kind == "bpe" and not problems:
        for field in ("data.sources", "data.cleaning"):
            reason = (
                "would train another tokenizer (data.tokenizer.kind: bpe) than the one whose tokens the weights know"
            )
            remedy = f"leave `{field}` as it is; a run with a tokenizer in a file can be given other data"
            problems += [Problem(name, value, reason, remedy) for name, value in _changed(before, spec, field)]
    kinds = before.training.gradient_compression, spec.training.gradient_compression
    if kinds[0] != kinds[1] and any(kind in KEEPING for kind in kinds):
        problems.append(
            Problem(
                "training.gradient_compression",
                kinds[1],
                "is another one than that of the run: what ranks leave out with powersgd and topk is part of the state",
                f"leave it at {kinds[0]}, or export the run and begin a new one with model.init_from",
            )
        )
    if not 0 < step < spec.training.steps:
        problems.append(
            Problem(
                "training.steps",
                spec.training.steps,
                f"leaves nothing to train after step {step}",
                f"more than {step}: --set training.steps=N, or an earlier --to",
            )
        )
    anomalies = spec.training.anomalies
    if anomalies.action == "rewind" and step % anomalies.rewind_steps:
        problems.append(
            Problem(
                "training.anomalies.rewind_steps",
                anomalies.rewind_steps,
                f"step {step} is no multiple of it: an anomaly could send the run back behind where it begins",
                "--to a multiple, or --set training.anomalies.rewind_steps=N with one that divides the step",
            )
        )
    if problems:
        raise SpecError(problems, "--set")


def _changed(before: Spec, spec: Spec, field: str) -> Iterator[tuple[str, Any]]:
    """The changed fields below `field` and their new values, without the weights of data mixes."""
    old, new = (_leaves(field, reduce(getattr, field.split("."), root)) for root in (before, spec))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not name.endswith(".weight"):
            yield name, new.get(name)


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """The values in a section by dotted names."""
    if isinstance(value, BaseModel):
        fields = [(f"{name}.{field}", getattr(value, field)) for field in type(value).model_fields]
    elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        fields = [(f"{name}.{index}", item) for index, item in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for field, item in fields for key, leaf in _leaves(field, item).items()}


def _dataset_id(parent: RunRecord, before: Spec, spec: Spec) -> str:
    """The parent's dataset id while the data section is unchanged, wherever its sources are now."""
    if spec.data == before.data:
        return parent.dataset_id
    from holdfast.corpus import identify

    return identify(spec)


def _weights(spec: Spec) -> str:
    from holdfast.model.hub import first_weights_digest

    return first_weights_digest(spec)


def _record(store: Store, submitted: Record | None, spec: Spec, identity: str, salt: str) -> Record:
    """The submission that resumes the new run, on the backend of its parent if that is known. `submitted` is the
    parent's."""
    base = submitted or Record("local", identity, identity, spec.name, "", 0.0, store.url)
    return replace(
        base,
        id=identity,
        run_id=identity,
        name=spec.name,
        spec=dump_spec(spec),
        salt=salt,
        submitted=time.time(),
        replan=False,
        host="",
        pid=0,
        began=0.0,
        log="",
        outcomes="",
        former=None,
        job="",
        trials=(),
        search=None,
        concurrent_trials=0,
        ran="",
    )
