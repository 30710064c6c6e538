"""`python -m components.register --spec S --run-id R`: register the model of a finished, blessed run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from components.register import run
from components.spec.step import configure_logging, exit_code_of, publish, spec_and_store, step_parser
from components.store import open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; the exit code is the table's."""
    parser = step_parser(__doc__ or "")
    parser.add_argument("--run-id", required=True, help="the run whose model is registered")
    parser.add_argument("--verdict", help="key of the verdict to go by; default: the newest")
    arguments = parser.parse_args(argv)
    configure_logging()

    def body() -> None:
        spec, url = spec_and_store(arguments)
        publish(asdict(run(spec, arguments.run_id, open_store(url), arguments.verdict)), arguments.output)

    return exit_code_of(body)


if __name__ == "__main__":
    sys.exit(main())
