"""`python -m components.notify --status failed`: say what became of a DAG. Always ends with 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from components.notify import run
from components.spec.step import configure_logging, exit_code_of, publish


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--status", required=True, help="how the DAG ended: succeeded, failed or cancelled")
    parser.add_argument("--spec", type=Path, help="the spec file; it may be missing or broken")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the spec")
    parser.add_argument("--store", default="", help="root of the store; default: as for every step")
    parser.add_argument("--run-id", default="", help="the run, if it is known")
    parser.add_argument("--failed-step", default="", help="the step that failed")
    parser.add_argument("--message", default="", help="what it said")
    parser.add_argument("--log", default="", help="where its log is: a path or a URL")
    parser.add_argument("--output", type=Path, help="also write the summary there, as JSON")
    arguments = parser.parse_args(argv)
    configure_logging()

    def body() -> None:
        spec = arguments.spec
        summary = run(
            arguments.status,
            spec.read_text(encoding="utf-8", errors="replace") if spec and spec.is_file() else "",
            arguments.store,
            arguments.run_id,
            overrides=arguments.set,
            failed_step=arguments.failed_step,
            message=arguments.message,
            log_place=arguments.log,
        )
        publish({"text": summary.text, **asdict(summary)}, arguments.output)

    exit_code_of(body)  # a failure here is in the log; the DAG's own outcome stands
    return 0


if __name__ == "__main__":
    sys.exit(main())
