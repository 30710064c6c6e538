"""`holdfast checkpoints`: list, verify, compare, pin, collect, export and import checkpoints."""

import shlex
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.api import checkpoints
from holdfast.pipelines.cli.options import AsJson, RunName, SpecOptions, StoreRoot, open_chosen, out, print_json
from holdfast.spec.errors import ExitCode

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, verify, compare, pin, delete, export and import checkpoints of runs.",
)

AtStep = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="A run, and the step of a checkpoint. Default: the newest one.",
        show_default=False,
    ),
]
Pinner = Annotated[str, typer.Option("--as", metavar="NAME", help="Owner of the pin. Each owner has a separate pin.")]


class Target(StrEnum):
    """Formats that a checkpoint can be exported to."""

    HF = "hf"
    HF_EMA = "hf-ema"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


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
    from holdfast.pipelines.view.checkpoints import print_list

    infos = checkpoints.list_checkpoints(run, store)
    if as_json:
        print_json(infos)
        return
    print_list(checkpoints.run_id_of(open_chosen(store), run), infos)


@app.command()
def show(checkpoint: AtStep, store: StoreRoot = "", as_json: AsJson = False) -> None:
    """Show one checkpoint: its size, digest, layout, segments and tensors.

    The layout is the one that wrote the checkpoint. The segments are those of the run up to it.

    Example: holdfast checkpoints show 3f2a@1200
    """
    from holdfast.pipelines.view.checkpoints import print_checkpoint

    opened = checkpoints.open_checkpoint(checkpoint, store)
    if as_json:
        print_json(opened.manifest.model_dump(mode="json"))
        return
    print_checkpoint(opened)


@app.command()
def verify(checkpoint: AtStep, store: StoreRoot = "", as_json: AsJson = False) -> None:
    """Read and check every byte of a checkpoint, or of all checkpoints of a run.

    Also checks the models that were exported from them. It may run while the run trains. Prints a line for each
    checkpoint. Ends with 13 if something is damaged, and names the object and the tensor.

    Example: holdfast checkpoints verify 3f2a
    """
    from holdfast.pipelines.view.checkpoints import bytes_read, print_verified

    found = []
    with bytes_read("verified", quiet=as_json) as progress:
        for result in checkpoints.verify(checkpoint, store, progress):
            found.append(result)
            if not as_json:
                print_verified(result)
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
    from holdfast.pipelines.view.checkpoints import bytes_read, print_difference

    first = checkpoints.open_checkpoint(one, store)
    second = checkpoints.open_checkpoint(other, other_store or store)
    with bytes_read("compared", quiet=as_json) as progress:
        difference = checkpoints.diff_checkpoints(first, second, progress)
    if as_json:
        print_json({"equal": difference.none, "difference": difference})
    else:
        print_difference(difference, first.manifest.state_digest)
    raise typer.Exit(int(ExitCode.OK if difference.none else ExitCode.MISMATCH))


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
    identity, step = checkpoints.pin(checkpoint, owner=name, reason=reason, store=store)
    out(f"step {step} of run {identity} is pinned by {name}; to unpin it: holdfast checkpoints unpin {identity}@{step}")


@app.command()
def unpin(checkpoint: AtStep, name: Pinner = "person", store: StoreRoot = "") -> None:
    """Remove a pin from a checkpoint.

    If nothing else keeps the checkpoint, the next collection deletes it.

    Example: holdfast checkpoints unpin 3f2a@1200
    """
    identity, step = checkpoints.unpin(checkpoint, owner=name, store=store)
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
    from holdfast.pipelines.view.checkpoints import print_collected

    identity, collected = checkpoints.collect_garbage(run, dry_run=dry_run, store=store)
    if as_json:
        print_json(collected)
        return
    print_collected(identity, collected, dry_run)


@app.command()
def export(
    checkpoint: AtStep,
    destination: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Destination: a folder or s3://…", show_default=False)
    ],
    to: Annotated[
        Target,
        typer.Option(
            help="hf: the model, for transformers. hf-ema: likewise, with averaged weights. dcp: the whole state, for "
            "torch's `dcp.load`. deepspeed: weights and moments, as a universal checkpoint."
        ),
    ] = Target.HF,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in a format of other software.

    The files are written to FOLDER, with bounded memory.

    Example: holdfast checkpoints export 3f2a@1200 model/ --to hf
    """
    from holdfast.pipelines.view.checkpoints import bytes_read

    with bytes_read("written", quiet=as_json) as progress:
        run_id, step = checkpoints.export_checkpoint(checkpoint, destination, to.value, store, progress)
    if as_json:
        print_json({"run_id": run_id, "step": step, "to": to.value, "at": destination})
        return
    out(f"step {step} of run {run_id} is in {destination}")


@app.command("import")
def import_(
    spec: SpecOptions,
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
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Import a state of other software as the first checkpoint of a run of a spec.

    Prints the run id, and the command that continues the run from that state. The id depends on the imported bits, so
    the run differs from one that starts from the spec's seed. No code of the source is executed.

    Example: holdfast checkpoints import spec.yaml llama-1b/ --from hf
    """
    from holdfast.pipelines.view.checkpoints import bytes_read

    with bytes_read("imported", quiet=as_json) as progress:
        imported = checkpoints.import_checkpoint(
            spec.load(), source, origin.value, step=step, store=store, progress=progress
        )
    if as_json:
        print_json(imported)
        return
    content = "weights and moments" if imported.moments else "weights; the moments start at zero"
    out(
        f"run {imported.run_id} {'already has' if imported.again else 'starts with'} {source} as its step "
        f"{imported.step} ({content})"
    )
    options = [word for override in spec.overrides or () for word in ("--set", override)] + (
        ["--store", store] if store else []
    )
    out(f"to continue: {shlex.join(['holdfast', 'run', str(spec.path), *options, '--salt', imported.salt])}")
