"""`holdfast checkpoints`: list, verify, compare, pin, collect, export and import checkpoints."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, RunName, SpecFile, StoreRoot, open_chosen, out, print_json
from holdfast.spec.errors import ExitCode, MissingError

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint
    from holdfast.dataset import Dataset
    from holdfast.spec import Spec
    from holdfast.store import Store

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, verify, compare, pin, delete, export and import checkpoints of runs.",
)

AtStep = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]", help="A run, and the step of a checkpoint. Default: the newest one.",
        show_default=False,
    ),
]  # fmt: skip
Pinner = Annotated[str, typer.Option("--as", metavar="NAME", help="Owner of the pin. Each owner has a separate pin.")]


class Target(StrEnum):
    """Formats that a checkpoint can be exported to."""

    HF = "hf"
    DCP = "dcp"


class Origin(StrEnum):
    """Formats that a state can be imported from."""

    HF = "hf"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


@app.command("list")
def list_(run: RunName, store: StoreRoot = "", as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first.

    Prints for each one its step, age, size and attempt, how much of it was new, and why it is kept.

    Example: holdfast checkpoints list 3f2a
    """
    from holdfast.checkpoint.tools import list_checkpoints, retention_of
    from holdfast.pipelines.view.checkpoints import print_list

    opened = open_chosen(store)
    identity = _run_id(opened, _all_of(run))
    found = list_checkpoints(opened, identity, retention_of(opened, identity))
    if as_json:
        print_json(found)
        return
    print_list(identity, found)


@app.command()
def show(checkpoint: AtStep, store: StoreRoot = "", as_json: AsJson = False) -> None:
    """Show one checkpoint: its size, digest, layout, segments and tensors.

    The layout is the one that wrote the checkpoint. The segments are those of the run up to it.

    Example: holdfast checkpoints show 3f2a@1200
    """
    from holdfast.pipelines.view.checkpoints import print_checkpoint

    found = _open(open_chosen(store), checkpoint)
    if as_json:
        print_json(found.manifest.model_dump(mode="json"))
        return
    print_checkpoint(found)


@app.command()
def verify(checkpoint: AtStep, store: StoreRoot = "", as_json: AsJson = False) -> None:
    """Read and check every byte of a checkpoint, or of all checkpoints of a run.

    Also checks the models that were exported from them. It may run while the run trains. Prints a line for each
    checkpoint. Ends with 13 if something is damaged, and names the object and the tensor.

    Example: holdfast checkpoints verify 3f2a
    """
    from holdfast.checkpoint.retention import checkpoint_times
    from holdfast.checkpoint.tools import verify as verified
    from holdfast.pipelines.exports import exports_of, verify_export
    from holdfast.pipelines.view.checkpoints import bytes_read, print_verified

    opened = open_chosen(store)
    wanted, at, _ = checkpoint.partition("@")
    identity = _run_id(opened, wanted)
    steps = [_step(opened, identity, checkpoint)] if at else list(checkpoint_times(opened, identity))
    if not steps:
        raise MissingError(f"run {identity} has no checkpoint in {opened.url} yet")
    found = []
    for step in steps:
        with bytes_read(f"step {step}", quiet=as_json) as progress:
            found.append(verified(opened, identity, step, progress))
        if not as_json:
            print_verified(found[-1])
    for export in exports_of(opened, identity, steps if at else None):
        with bytes_read("exported model", quiet=as_json) as progress:
            found.append(verify_export(opened, identity, export, progress))
        if not as_json:
            print_verified(found[-1])
    if as_json:
        print_json(found)
    if any(each.damages for each in found):
        raise typer.Exit(int(ExitCode.NO_CHECKPOINT_VERIFIES))


@app.command()
def diff(
    one: AtStep,
    other: AtStep,
    store: StoreRoot = "",
    other_store: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Store of the second checkpoint. Default: that of the first.", show_default=False
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show where two checkpoints differ, to the bit.

    Prints for each differing tensor the first differing element, both values, and their distance in units of the last
    place. Ends with 0 if the checkpoints are equal, and with 6 if they differ.

    Example: holdfast checkpoints diff 3f2a@1200 9b1c@1200
    """
    from holdfast.checkpoint.tools import differences
    from holdfast.pipelines.view.checkpoints import bytes_read, print_difference

    first = _open(open_chosen(store), one)
    second = _open(open_chosen(other_store or store), other)
    with first.marked(), second.marked(), bytes_read("compared", quiet=as_json) as progress:
        found = differences(first, second, progress)
    if as_json:
        print_json({"equal": found.none, "difference": found})
    else:
        print_difference(found, first.manifest.state_digest)
    raise typer.Exit(int(ExitCode.OK if found.none else ExitCode.MISMATCH))


@app.command()
def pin(
    checkpoint: AtStep,
    reason: Annotated[str, typer.Option(help="Reason, which `list` shows.", show_default=False)] = "",
    name: Pinner = "person",
    store: StoreRoot = "",
) -> None:
    """Keep a checkpoint until its last pin is removed, regardless of retention.

    Prints the command that removes the pin.

    Example: holdfast checkpoints pin 3f2a@1200 --reason "the figures of the paper"
    """
    from holdfast.checkpoint import pin as pinned

    opened = open_chosen(store)
    identity, step = _at(opened, checkpoint)
    pinned(opened, identity, step, name, reason)
    out(f"step {step} of run {identity} is pinned by {name}; to unpin it: holdfast checkpoints unpin {identity}@{step}")


@app.command()
def unpin(checkpoint: AtStep, name: Pinner = "person", store: StoreRoot = "") -> None:
    """Remove a pin from a checkpoint.

    If nothing else keeps the checkpoint, the next collection deletes it.

    Example: holdfast checkpoints unpin 3f2a@1200
    """
    from holdfast.checkpoint import unpin as unpinned

    opened = open_chosen(store)
    identity, step = _at(opened, checkpoint)
    unpinned(opened, identity, step, name)
    out(f"step {step} of run {identity} is no longer pinned by {name}")


@app.command()
def gc(
    run: RunName,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would delete; delete nothing.")] = False,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Delete immediately what retention does not keep.

    A run does the same after its saves. `gc` may run at the same time. Prints the deleted steps, objects and bytes.

    Example: holdfast checkpoints gc 3f2a --dry-run
    """
    from holdfast.checkpoint.tools import collect_now, retention_of
    from holdfast.pipelines.view.checkpoints import print_collected

    opened = open_chosen(store)
    identity = _run_id(opened, _all_of(run))
    found = collect_now(opened, identity, retention_of(opened, identity), dry_run=dry_run)
    if as_json:
        print_json(found)
        return
    print_collected(identity, found, dry_run)


@app.command()
def export(
    checkpoint: AtStep,
    destination: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Destination: a folder, or s3://… with --to hf.", show_default=False)
    ],
    to: Annotated[
        Target, typer.Option(help="hf: the model, for transformers. dcp: the whole state, for torch's `dcp.load`.")
    ] = Target.HF,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in a format of other software.

    The files are written to FOLDER, with bounded memory.

    Example: holdfast checkpoints export 3f2a@1200 model/ --to hf
    """
    from holdfast.exchange import export_dcp, export_hugging_face
    from holdfast.pipelines.paths import store_root
    from holdfast.pipelines.view.checkpoints import bytes_read
    from holdfast.store import open_store

    opened = open_chosen(store)
    found = _open(opened, checkpoint)
    with found.marked(), bytes_read("written", quiet=as_json) as progress:
        if to is Target.DCP:
            if "://" in destination:
                raise typer.BadParameter(f"{destination}: --to dcp writes only to a folder of this machine")
            export_dcp(found, Path(destination), progress)
        else:
            spec, dataset = _described(opened, found.manifest.run_id, found.manifest.dataset_id)
            export_hugging_face(found, spec, dataset, open_store(store_root(destination)), progress)
    if as_json:
        print_json({"run_id": found.manifest.run_id, "step": found.step, "to": to.value, "at": destination})
        return
    out(f"step {found.step} of run {found.manifest.run_id} is in {destination}")


@app.command("import")
def import_(
    spec: SpecFile,
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="State to import.", show_default=False)],
    origin: Annotated[
        Origin,
        typer.Option(
            "--from",
            help="hf: weights in the Hugging Face layout; FOLDER may be s3://…. dcp: a distributed checkpoint of "
            "torch. deepspeed: a universal checkpoint.",
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="Optimizer steps that made the state.")] = 0,
    overrides: Overrides = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Import a state of other software as the first checkpoint of a run of a spec.

    Prints the run id, and the command that continues the run from that state. The id depends on the imported bits, so
    the run differs from one that starts from the spec's seed. No code of the source is executed.

    Example: holdfast checkpoints import spec.yaml llama-1b/ --from hf
    """
    from holdfast import exchange
    from holdfast.pipelines.backends.local.run import identified
    from holdfast.pipelines.view.checkpoints import bytes_read
    from holdfast.spec.load import load_spec

    made = identified(load_spec(spec, overrides or ()), store)
    found: exchange.Source
    if origin is Origin.HF:
        found = exchange.HuggingFace(source)
    elif origin is Origin.DCP:
        found = exchange.DistributedCheckpoint(Path(source))
    else:
        found = exchange.UniversalCheckpoint(Path(source))
    with bytes_read("imported", quiet=as_json) as progress:
        told = exchange.import_checkpoint(made.spec, made.dataset_id, found, made.store, step=step, progress=progress)
    if as_json:
        print_json(told)
        return
    what = "weights and moments" if told.moments else "weights; the moments start at zero"
    out(f"run {told.run_id} {'already has' if told.again else 'starts with'} {source} as its step {told.step} ({what})")
    repeated = [word for each in overrides or () for word in ("--set", each)] + (["--store", store] if store else [])
    out(f"to continue: {shlex.join(['holdfast', 'run', str(spec), *repeated, '--salt', told.salt])}")


def _described(store: Store, identity: str, dataset_id: str) -> tuple[Spec, Dataset]:
    """The spec of a run and its dataset. Raises MissingError."""
    from holdfast.dataset import Dataset
    from holdfast.pipelines.view.catalog import read_run
    from holdfast.runtime.environment import cache_dir
    from holdfast.spec import Spec

    record = read_run(store, identity)
    if record is None or not record.spec:
        raise MissingError(
            f"run {identity}: {store.url} has no spec of it, because it was never trained; export it with --to dcp"
        )
    return Spec.model_validate(record.spec), Dataset.open(store, dataset_id, cache_dir())


def _all_of(run: str) -> str:
    """The same name of a run. Raises BadParameter if it has a step."""
    name, at, _ = run.partition("@")
    if at:
        raise typer.BadParameter(
            f"{run!r} names one checkpoint, but this command takes a run: write {name}. To show the checkpoint: "
            f"holdfast checkpoints show {run}",
            param_hint="RUN",
        )
    return run


def _run_id(store: Store, wanted: str) -> str:
    """The id of the run that `wanted` names. Raises MissingError."""
    from holdfast.checkpoint.retention import checkpoint_times
    from holdfast.pipelines.view.catalog import find_run

    return wanted if checkpoint_times(store, wanted) else find_run(store, wanted).run_id


def _at(store: Store, checkpoint: str) -> tuple[str, int]:
    """The run and the step that RUN[@STEP] names."""
    identity = _run_id(store, checkpoint.partition("@")[0])
    return identity, _step(store, identity, checkpoint)


def _step(store: Store, identity: str, checkpoint: str) -> int:
    from holdfast.checkpoint.lineage import newest_step
    from holdfast.checkpoint.retention import checkpoint_times

    _, at, step = checkpoint.partition("@")
    steps = list(checkpoint_times(store, identity))
    if not steps:
        raise MissingError(f"run {identity} has no checkpoint in {store.url} yet")
    if not at:
        return newest_step(store, identity) or steps[-1]
    if not step.isdecimal():
        raise typer.BadParameter(f"{checkpoint!r} is not RUN@STEP, such as {identity}@{steps[-1]}")
    if int(step) not in steps:
        has = ", ".join(map(str, steps))
        raise MissingError(f"run {identity} has no checkpoint at step {step} in {store.url} (it has: {has})")
    return int(step)


def _open(store: Store, checkpoint: str) -> Checkpoint:
    from holdfast.checkpoint import open_checkpoint

    return open_checkpoint(store, *_at(store, checkpoint))
