"""`holdfast validate`, `compile` and `trigger`, and for training scripts `holdfast init` and `holdfast verify`."""

import ast
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.planning import candidates_of, micro_batch_trial
from holdfast.api.specs import Target, compile_spec, identify, missing_sources, target_of
from holdfast.api.specs import schema as schema_of_specs
from holdfast.pipelines.cli.options import (
    AsJson,
    Image,
    Overrides,
    Salt,
    SpecFile,
    SpecOptions,
    StoreRoot,
    out,
    print_json,
)
from holdfast.pipelines.cli.run import ConcurrentTrials, Over
from holdfast.spec.errors import DataError, ExitCode, MissingError, UsageError


def validate(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="The spec: a YAML file. Not with --schema.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Also print the dataset id and the run id. Reads the sources.")
    ] = False,
    salt: Salt = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of specs, for editors, and check nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a spec, and print every problem with file and line.

    Reads no data, and starts nothing. A source that matches no file here is a warning.
    Of a spec with `model.from` it reads that model's config.json and tokenizer, and
    prints the fields that they fill in. The first line of a spec can name the schema for your editor:
    # yaml-language-server: $schema=spec.schema.json

    Example: holdfast validate examples/quickstart.yaml --set training.steps=50
    """
    if schema == (path is not None):
        raise typer.BadParameter("give either a spec or --schema", param_hint="SPEC")
    if path is None:
        if overrides or ids or salt:
            raise typer.BadParameter("takes no other option", param_hint="--schema")
        print_json(schema_of_specs())
        return
    from holdfast.pipelines.paths import load_filled
    from holdfast.spec.tree import require_trackers

    if salt and not ids:
        raise typer.BadParameter("is used only with --ids", param_hint="--salt")
    checked_spec, filled = load_filled(path, overrides or ())
    require_trackers(checked_spec)
    identities: dict[str, Any] = {}
    if ids:
        local_run = identify(checked_spec, salt)
        identities = {"dataset_id": local_run.dataset_id, "run_id": local_run.run_id}
    warnings = missing_sources(checked_spec)
    script, candidates = checked_spec.train.script, candidates_of(checked_spec)
    if as_json:
        summary = {
            "name": checked_spec.name,
            "steps": checked_spec.training.steps,
            "processes": checked_spec.world_size,
        }
        trial = {"micro_batch": {"auto": True, "candidates": candidates}} if candidates else {}
        notes = {"warnings": warnings} if warnings else {}
        print_json({**summary, **identities, **({"filled": filled} if filled else {}), **trial, **notes})
        return
    length = f"{checked_spec.training.steps} steps" if script is None else f"script {script}"
    processes = "one process" if checked_spec.world_size == 1 else f"{checked_spec.world_size} processes"
    out(f"{path}: valid ({checked_spec.name}, {length}, {processes})")
    for warning in warnings:
        out(f"warning: {warning}")
    if candidates:
        out(micro_batch_trial(candidates))
    if filled:
        out("filled in by model.from:")
    for name, value in filled.items():
        out(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    if identities:
        out(
            "\n".join(
                f"{label:<8}{identity}"
                for label, identity in zip(("dataset", "run"), identities.values(), strict=True)
                if identity
            )
        )


def verify(
    spec: SpecFile,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 8,
    resume_at: Annotated[
        int | None, typer.Option(min=1, help="Step of the stop. Default: the middle, and the end of an epoch.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check that the training script of a spec resumes with the bits of an undisturbed run.

    Runs the script on this machine, in a temporary store: once for all steps, and again with a stop and a resume in a
    new launch, in the middle and at the end of an epoch. Ends with 0 if metrics and state are equal, and with 21 if
    not, and names the differences. It shows nothing about later steps.

    Example: holdfast verify examples/scripts/loop/spec.yaml
    """
    from holdfast.api import machines

    result = machines.verify(spec, overrides=overrides or (), steps=steps, resume_at=resume_at)
    if as_json:
        print_json(result.model_dump(mode="json") | {"exact": result.is_exact})
    result.require()
    if not as_json:
        out(f"{spec}: {result.text}: every metric and the state")


_LOOP = """import holdfast

session = holdfast.session(seed=0)                  # before anything is drawn
start = session.restore(model=model, optimizer=optimizer, steps=steps)  # and schedule=, ...: all that has state
for step in range(start, steps):
    ...                                             # your step
    session.step(step + 1, loss=loss)               # after each optimizer step
session.export(model)"""
_TRAINER = """import holdfast.integrations.transformers as hold

hold.train(trainer)                                 # instead of trainer.train()"""


def init(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script: a Python file.")],
    processes: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
) -> None:
    """Write a spec for a training script next to it, and show the lines to add to the script.

    The script itself is not changed and not imported. An existing spec.yaml is kept.

    Example: holdfast init examples/scripts/loop/train.py --processes 2
    """
    if not script.is_file():
        raise MissingError(f"{script}: no such file; name a Python file")
    if script.suffix != ".py":
        raise UsageError(f"{script} is no Python file", "SCRIPT", "name a file that ends with .py")
    path = script.parent / "spec.yaml"
    if path.exists():
        raise UsageError(f"{path} exists", "SCRIPT", f"run it: holdfast run {path}")
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{script}: cannot be parsed: {error}") from None
    words = {part for node in ast.walk(tree) for part in _imported(node)}
    stem = script.stem if script.stem not in ("train", "main") else script.absolute().parent.name
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name[:50].rstrip("-") if name[:1].isalpha() else "script"
    from holdfast.spec.schema import MODELINE, SCHEMA_URL

    parallel = f"parallel: {{processes: {processes}}}\n" if processes > 1 else ""
    path.write_text(
        f"{MODELINE}{SCHEMA_URL}\n"
        f"name: {name}\ntrain:\n  script: {json.dumps(script.name)}\n  determinism: exact\n{parallel}"
        "checkpoint: {every_steps: 50}\n"
    )
    out(f"wrote {path}")
    if "holdfast" not in words:
        out(f"\nAdd to {script}:\n\n{_TRAINER if 'transformers' in words else _LOOP}\n")
    out(f"Check that it resumes exactly: holdfast verify {path}\nRun it: holdfast run {path}")


def _imported(node: ast.AST) -> list[str]:
    """The top-level packages that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def trigger(
    spec: SpecOptions,
    store: StoreRoot = "",
    salt: Annotated[str, typer.Option(help="The salt that the retraining would have.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole decision as JSON.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 4 when nothing is due.")] = False,
) -> None:
    """Print whether a retraining is due, and why. Trains nothing.

    Example: holdfast trigger examples/quickstart.yaml --exit-code && holdfast run examples/quickstart.yaml
    """
    from holdfast.api.specs import trigger as decide

    decision = decide(spec.load(), store=store, salt=salt)
    out(decision.model_dump_json(indent=2) if as_json else f"{decision.word.replace('_', ' ')}: {decision.reason}")
    raise typer.Exit(int(ExitCode.NOT_DUE if exit_code and not decision.due else ExitCode.OK))


def compile_(
    spec: SpecOptions,
    target: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            autocompletion=lambda: [one.value for one in Target],
            help="kfp, argo, slurm and rayjob: the whole pipeline; kserve and deployment: what serves its champion; "
            "deepspeed: the configuration of its engine; form: the spec as JSON, to paste into Kubeflow's form; "
            "component: the train step for another Kubeflow pipeline; "
            "pytorchjob, trainjob and volcano: the training job.",
        ),
    ] = "kfp",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write it; - prints it.", show_default="pipeline.yaml for kfp, else -"
        ),
    ] = None,
    image: Image = "",
    over: Over = None,
    concurrent_trials: ConcurrentTrials = 0,
) -> None:
    """Write the pipeline of a spec for Kubeflow, or the manifests for another system. Sends nothing.

    The spec and overrides are parameters of the pipeline, which the UI of Kubeflow shows. With --over, it writes the
    pipeline of a sweep.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    system = target_of(target)
    text = compile_spec(spec.load(), system, image=image, over=over or (), concurrent_trials=concurrent_trials)
    output = output or Path("pipeline.yaml" if system is Target.KFP else "-")
    if str(output) == "-":
        out(text.rstrip("\n"))
        return
    from holdfast.pipelines.documents import write_whole

    write_whole(output, text)
    out(f"{output}: written")
