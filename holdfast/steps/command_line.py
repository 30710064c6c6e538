"""Command line arguments of every step, and output of its result."""

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.code.resolve import is_kept, load_spec, publish_code
from holdfast.runtime.environment import store_url
from holdfast.spec.engine_text import escape, unescape
from holdfast.spec.errors import DataError, Problem, SpecError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.load import parse_spec, read_spec_text
from holdfast.spec.tree import Spec
from holdfast.store import open_store


def add_common(parser: argparse.ArgumentParser, spec_required: bool = True) -> None:
    """Add the arguments that every step takes."""
    parser.add_argument("--spec", required=spec_required, type=Path, help="the spec file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the spec")
    parser.add_argument(
        "--store", default="", help="root of the store; default: the spec's, HOLDFAST_STORE, or a local folder"
    )
    parser.add_argument("--overrides", default="[]", metavar="JSON", help="overrides in one argument, before --set")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    parser.add_argument("--outputs", type=Path, help="also write each field of the result to a file in this folder")
    parser.add_argument(
        "--escaped",
        action="store_true",
        help="the spec file and the arguments are escaped for a pipeline engine, and so is what goes to --outputs",
    )
    parser.add_argument("--job", default="", help="the execution of the DAG, whose exit handler wants the outcome")


def spec_and_store(arguments: argparse.Namespace, changes: Sequence[str] = ()) -> tuple[Spec, str]:
    """The spec, with `changes` before all overrides, and the store's URL from the arguments of `add_common`."""
    overrides = [*changes, *overrides_of(arguments)]
    if arguments.escaped:
        spec = parse_spec(unescape(read_spec_text(arguments.spec)), overrides, source=str(arguments.spec))
    else:
        spec = load_spec(arguments.spec, overrides)
    url = arguments.store or store_url(spec)
    if spec.code is not None and is_kept(spec.code):  # a person runs the step next to the code
        publish_code(spec, open_store(url))
    return spec, url


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The overrides of --overrides, then those of --set. Raises SpecError."""
    try:
        overrides = parse_json(arguments.overrides or "[]", list[str], "--overrides")
    except DataError:
        remedy = 'write it as ["training.steps=50", "name=other"]'
        problem = Problem("--overrides", arguments.overrides, "is not a JSON list of key=value", remedy)
        raise SpecError([problem], "overrides") from None
    return [*overrides, *arguments.set]


def report_progress(done: int, total: int) -> None:
    """Write the step's progress to ARGO_PROGRESS_FILE, if set: Argo shows it."""
    file = os.environ.get("ARGO_PROGRESS_FILE")
    if file and total > 0:
        with contextlib.suppress(OSError):  # a progress bar must not end a training
            Path(file).write_text(f"{min(done, total)}/{total}\n", encoding="ascii")


def publish(
    result: dict[str, object], output: Path | None, outputs: Path | None = None, *, escaped: bool = False
) -> None:
    """Print a step's result as one JSON line on standard output, and write it to `output` if given.

    Each of its fields becomes a file in the folder `outputs` if given: text unchanged, anything else as JSON. `escaped`
    is for files that a pipeline engine reads.
    """
    line = json.dumps(result, ensure_ascii=False)
    print(line, flush=True)  # noqa: T201
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(line + "\n", encoding="utf-8")
    if outputs is not None:
        outputs.mkdir(parents=True, exist_ok=True)
        for name, value in result.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            (outputs / name).write_text(escape(text) if escaped else text, encoding="utf-8")
