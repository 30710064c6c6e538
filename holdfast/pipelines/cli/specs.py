"""`holdfast validate`: checks a spec, and prints its ids or the schema of specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.specs import identify
from holdfast.api.specs import schema as schema_of_specs
from holdfast.pipelines.cli.options import AsJson, Overrides, Salt, out, print_json


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

    Reads no data, and starts nothing. Of a spec with `model.from` it reads that model's config.json and tokenizer, and
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

    if salt and not ids:
        raise typer.BadParameter("is used only with --ids", param_hint="--salt")
    checked_spec, filled = load_filled(path, overrides or ())
    identities: dict[str, Any] = {}
    if ids:
        local_run = identify(checked_spec, salt)
        identities = {"dataset_id": local_run.dataset_id, "run_id": local_run.run_id}
    if as_json:
        summary = {
            "name": checked_spec.name,
            "steps": checked_spec.training.steps,
            "processes": checked_spec.world_size,
        }
        print_json({**summary, **identities, **({"filled": filled} if filled else {})})
        return
    processes = "one process" if checked_spec.world_size == 1 else f"{checked_spec.world_size} processes"
    out(f"{path}: valid ({checked_spec.name}, {checked_spec.training.steps} steps, {processes})")
    if filled:
        out("filled in by model.from:")
    for name, value in filled.items():
        out(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    if identities:
        out(f"dataset {identities['dataset_id']}\nrun     {identities['run_id']}")
