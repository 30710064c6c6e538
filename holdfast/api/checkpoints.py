"""Checkpoints of runs: list, verify, compare, pin, collect, export and import them.

A checkpoint is named RUN@STEP, such as `3f2a@1200`; RUN alone is its newest one. RUN is an id, its beginning, or a
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.api.run_handle import Progress, silent
from holdfast.api.submission import Overrides, load_spec, open_store_at
from holdfast.spec import Spec
from holdfast.spec.errors import MissingError, UsageError
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint
    from holdfast.checkpoint.tools import CheckpointInfo, Collected, Difference, Verified
    from holdfast.dataset import Dataset
    from holdfast.exchange import ImportedCheckpoint

EXPORT_FORMATS = ("hf", "hf-ema", "dcp", "deepspeed")
IMPORT_FORMATS = ("hf", "dcp", "deepspeed")


def list_checkpoints(run: str, store: str | Store = "") -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first, with the reasons why each is kept. Raises MissingError."""
    from holdfast.checkpoint.tools import list_checkpoints as listed
    from holdfast.checkpoint.tools import retention_of

    opened_store = open_store_at(store)
    identity = run_id_of(opened_store, _whole_run(run))
    return listed(opened_store, identity, retention_of(opened_store, identity))


def open_checkpoint(checkpoint: str, store: str | Store = "") -> Checkpoint:
    """A checkpoint, to read its manifest or its tensors. Raises MissingError."""
    from holdfast.checkpoint import open_checkpoint as opened_at

    opened_store = open_store_at(store)
    return opened_at(opened_store, *locate(opened_store, checkpoint))


def verify(checkpoint: str, store: str | Store = "", progress: Progress | None = None) -> Iterator[Verified]:
    """Read and check every byte of a checkpoint, or with RUN of all of them, and of the models exported from them.

    Yields one result for each, as soon as it is read. Raises MissingError.
    """
    from holdfast.checkpoint.retention import checkpoint_times
    from holdfast.checkpoint.tools import verify as verified
    from holdfast.pipelines.exports import exports_of, verify_export

    opened, tell = open_store_at(store), progress or silent
    run, at, _ = checkpoint.partition("@")
    identity = run_id_of(opened, run)
    steps = [step_of(opened, identity, checkpoint)] if at else list(checkpoint_times(opened, identity))
    if not steps:
        raise MissingError(f"run {identity} has no checkpoint in {opened.url} yet")
    for step in steps:
        yield verified(opened, identity, step, tell)
    for export in exports_of(opened, identity, steps if at else None):
        yield verify_export(opened, identity, export, tell)


def diff_checkpoints(one: Checkpoint, other: Checkpoint, progress: Progress | None = None) -> Difference:
    """Where two checkpoints differ, to the bit."""
    from holdfast.checkpoint.tools import differences

    with one.marked(), other.marked():
        return differences(one, other, progress or silent)


def pin(checkpoint: str, *, owner: str = "person", reason: str = "", store: str | Store = "") -> tuple[str, int]:
    """Keep a checkpoint until its last pin is removed. Returns its run and step."""
    from holdfast.checkpoint import pin as pinned

    opened_store = open_store_at(store)
    identity, step = locate(opened_store, checkpoint)
    pinned(opened_store, identity, step, owner, reason)
    return identity, step


def unpin(checkpoint: str, *, owner: str = "person", store: str | Store = "") -> tuple[str, int]:
    """Remove the pin of an owner. Returns the run and the step of the checkpoint."""
    from holdfast.checkpoint import unpin as unpinned

    opened_store = open_store_at(store)
    identity, step = locate(opened_store, checkpoint)
    unpinned(opened_store, identity, step, owner)
    return identity, step


def collect_garbage(run: str, *, dry_run: bool = False, store: str | Store = "") -> tuple[str, Collected]:
    """Delete what the retention of a run does not keep. Returns its id, and what is (or would be) deleted."""
    from holdfast.checkpoint.tools import collect_now, retention_of

    opened_store = open_store_at(store)
    identity = run_id_of(opened_store, _whole_run(run))
    return identity, collect_now(opened_store, identity, retention_of(opened_store, identity), dry_run=dry_run)


def export_checkpoint(
    checkpoint: str,
    destination: str,
    to: str = "hf",
    store: str | Store = "",
    progress: Progress | None = None,
) -> tuple[str, int]:
    """Write a checkpoint in a format of other software. Returns its run and step.

    `hf`: the model, for transformers, into a folder or s3://… `hf-ema`: likewise, with the averages of
    `training.ema`. `dcp`: the whole state for torch, into a folder or s3://…
    `deepspeed`: weights and moments as a universal checkpoint, into a folder.
    """
    from holdfast.exchange import export_dcp, export_hugging_face, export_universal, upload_dcp
    from holdfast.pipelines.paths import store_root
    from holdfast.store import open_store

    if to not in EXPORT_FORMATS:
        raise UsageError(f"{to!r} is no format", "--to", f"use one of {', '.join(EXPORT_FORMATS)}")
    opened_store, tell = open_store_at(store), progress or silent
    source = open_checkpoint(checkpoint, opened_store)
    with source.marked():
        if to == "dcp" and "://" in destination:
            upload_dcp(source, open_store(store_root(destination)), tell)
        elif to == "dcp":
            export_dcp(source, Path(destination), tell)
        elif to == "deepspeed":
            if "://" in destination:
                raise UsageError(f"{destination} is no folder", "FOLDER", "export it into a folder, and copy that")
            export_universal(source, Path(destination), tell)
        else:
            spec, dataset = _described(opened_store, source.manifest.run_id, source.manifest.dataset_id)
            if to == "hf-ema":
                spec = _with_average(spec)
            export_hugging_face(source, spec, dataset, open_store(store_root(destination)), tell)
    return source.manifest.run_id, source.step


def _with_average(spec: Spec) -> Spec:
    """The spec of a run, with the export of its averages. Raises UsageError if it has none."""
    ema = spec.training.ema
    if ema.decay is None:
        raise UsageError("the run has no training.ema.decay, and so no averages", "--to", "use hf")
    training = spec.training.model_copy(update={"ema": ema.model_copy(update={"export": True})})
    return spec.model_copy(update={"training": training})


def import_checkpoint(
    spec: Spec | str | Path,
    source: str,
    format_: str,
    *,
    step: int = 0,
    overrides: Overrides = (),
    store: str = "",
    progress: Progress | None = None,
) -> ImportedCheckpoint:
    """Import a state of other software as the first checkpoint of a run of a spec. No code of the source is executed.

    The run continues with `holdfast.run(spec, salt=imported.salt)`.
    """
    from holdfast import exchange
    from holdfast.pipelines.backends.local.run import identified

    if format_ not in IMPORT_FORMATS:
        raise UsageError(f"{format_!r} is no format", "--from", f"use one of {', '.join(IMPORT_FORMATS)}")
    local_run = identified(spec if isinstance(spec, Spec) else load_spec(spec, overrides), store)
    origin: exchange.Source
    if format_ == "hf":
        origin = exchange.HuggingFace(source)
    elif format_ == "dcp":
        origin = exchange.DistributedCheckpoint(Path(source))
    else:
        origin = exchange.UniversalCheckpoint(Path(source))
    return exchange.import_checkpoint(
        local_run.spec, local_run.dataset_id, origin, local_run.store, step=step, progress=progress or silent
    )


def run_id_of(store: Store, wanted: str) -> str:
    """The id of the run that `wanted` names. Raises MissingError."""
    from holdfast.checkpoint.retention import checkpoint_times
    from holdfast.pipelines.view.catalog import find_run

    return wanted if checkpoint_times(store, wanted) else find_run(store, wanted).run_id


def locate(store: Store, checkpoint: str) -> tuple[str, int]:
    """The run and the step that RUN[@STEP] names. Raises MissingError."""
    identity = run_id_of(store, checkpoint.partition("@")[0])
    return identity, step_of(store, identity, checkpoint)


def step_of(store: Store, identity: str, checkpoint: str) -> int:
    """The step that RUN[@STEP] names in the run `identity`; the newest one without @STEP. Raises MissingError."""
    from holdfast.checkpoint.lineage import newest_step
    from holdfast.checkpoint.retention import checkpoint_times

    _, at, step = checkpoint.partition("@")
    steps: Sequence[int] = list(checkpoint_times(store, identity))
    if not steps:
        raise MissingError(f"run {identity} has no checkpoint in {store.url} yet")
    if not at:
        return newest_step(store, identity) or steps[-1]
    if not step.isdecimal():
        raise UsageError(f"{checkpoint!r} is not RUN@STEP, such as {identity}@{steps[-1]}")
    if int(step) not in steps:
        known_steps = ", ".join(map(str, steps))
        raise MissingError(f"run {identity} has no checkpoint at step {step} in {store.url} (it has: {known_steps})")
    return int(step)


def _whole_run(run: str) -> str:
    """The same name of a run. Raises UsageError if it has a step."""
    name, at, _ = run.partition("@")
    if at:
        raise UsageError(
            f"{run!r} names one checkpoint, but this command takes a run: write {name}. To show the checkpoint: "
            f"holdfast checkpoints show {run}"
        )
    return run


def _described(store: Store, identity: str, dataset_id: str) -> tuple[Spec, Dataset]:
    """The spec of a run and its dataset. Raises MissingError."""
    from holdfast.dataset import Dataset
    from holdfast.pipelines.view.run_record import read_run
    from holdfast.runtime.environment import cache_dir

    record = read_run(store, identity)
    if record is None or not record.spec:
        raise MissingError(
            f"run {identity}: {store.url} has no spec of it, because it was never trained; export it with --to dcp"
        )
    return Spec.model_validate(record.spec), Dataset.open(store, dataset_id, cache_dir())
