"""The shell around every step: arguments, logging and exit codes, the same for all of them.

A step's `__main__.py` builds its parser with `step_parser` and runs its body in `exit_code_of`; a KFP component calls
`exit_code_of` too, so that a container ends with the code of the table whoever started it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.components.spec.environment import store_url
from holdfast.components.spec.errors import ExitCode, HoldfastError, Problem, SpecError
from holdfast.components.spec.load import load_spec
from holdfast.components.spec.tree import Spec

log = logging.getLogger("holdfast")


def step_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every step takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--spec", required=True, type=Path, help="the spec file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the spec")
    parser.add_argument("--store", help="root of the store; default: the spec's, HOLDFAST_STORE, or a local folder")
    parser.add_argument("--overrides", default="[]", metavar="JSON", help="overrides in one argument, before --set")
    add_result_arguments(parser)
    return parser


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where the result goes, and for which execution of a DAG the step works."""
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    parser.add_argument("--outputs", type=Path, help="also write each field of the result to a file in this folder")
    parser.add_argument("--job", default="", help="the execution of the DAG, whose exit handler wants the outcome")


def spec_and_store(arguments: argparse.Namespace) -> tuple[Spec, str]:
    """The spec and the store's URL that the arguments of `step_parser` name."""
    spec = load_spec(arguments.spec, overrides_of(arguments))
    return spec, arguments.store or store_url(spec)


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The overrides of --overrides and then those of --set. Raises SpecError."""
    try:
        listed = json.loads(arguments.overrides or "[]")
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise ValueError
    except ValueError:
        remedy = 'write it as ["training.steps=50", "name=other"]'
        problem = Problem("--overrides", arguments.overrides, "is not a JSON list of key=value", remedy)
        raise SpecError([problem], "overrides") from None
    return [*listed, *arguments.set]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging() -> None:
    """Log to standard error: plain lines, or JSON lines when HOLDFAST_LOG=json (as on a cluster)."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("HOLDFAST_LOG") == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    wanted = os.environ.get("HOLDFAST_LOG_LEVEL") or "INFO"
    log.setLevel(logging.getLevelNamesMapping().get(wanted.upper(), logging.INFO))
    if wanted.upper() not in logging.getLevelNamesMapping():
        log.warning("HOLDFAST_LOG_LEVEL=%s is no level; write DEBUG, INFO or WARNING. INFO is used", wanted)


def exit_code_of(body: Callable[[], object]) -> ExitCode:
    """Run `body`; say on standard error what went wrong, and return the code that the table gives it."""
    try:
        body()
    except HoldfastError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted")
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            log.error("%s: no space left; free some, then run the same command again", error.filename or "disk")
            return ExitCode.NO_SPACE
        log.exception("unexpected failure: please report it with this traceback")
        return ExitCode.UNEXPECTED
    except Exception:
        log.exception("unexpected failure: please report it with this traceback")
        return ExitCode.UNEXPECTED
    return ExitCode.OK


def report_progress(done: int, total: int) -> None:
    """Say how far the step is where somebody wants to know: in ARGO_PROGRESS_FILE, which Argo shows."""
    file = os.environ.get("ARGO_PROGRESS_FILE")
    if file and total > 0:
        with contextlib.suppress(OSError):  # a bar in a UI is worth no training
            Path(file).write_text(f"{min(done, total)}/{total}\n", encoding="ascii")


def publish(result: dict[str, object], output: Path | None, outputs: Path | None = None) -> None:
    """Print a step's result as one JSON line on standard output, and write it to `output` when given.

    Each of its fields becomes a file in the folder `outputs` when given: text as it is, anything else as JSON.
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
            (outputs / name).write_text(text, encoding="utf-8")
