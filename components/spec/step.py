"""The shell around every step: arguments, logging and exit codes, the same for all of them.

A step's `__main__.py` builds its parser with `step_parser` and runs its body in `exit_code_of`; a KFP component calls
`exit_code_of` too, so that a container ends with the code of the table whoever started it.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from components.spec.environment import store_url
from components.spec.errors import ExitCode, HoldfastError
from components.spec.load import load_spec
from components.spec.tree import Spec

log = logging.getLogger("holdfast")


def step_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every step takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--spec", required=True, type=Path, help="the spec file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the spec")
    parser.add_argument("--store", help="root of the store; default: the spec's, HOLDFAST_STORE, or a local folder")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    return parser


def spec_and_store(arguments: argparse.Namespace) -> tuple[Spec, str]:
    """The spec and the store's URL that the arguments of `step_parser` name."""
    spec = load_spec(arguments.spec, arguments.set)
    return spec, arguments.store or store_url(spec)


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


def publish(result: dict[str, object], output: Path | None) -> None:
    """Print a step's result as one JSON line on standard output, and write it to `output` when given."""
    line = json.dumps(result, ensure_ascii=False)
    print(line, flush=True)  # noqa: T201
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(line + "\n", encoding="utf-8")
