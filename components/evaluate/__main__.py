"""`python -m components.evaluate --spec S --run-id R`: score a finished run and say whether its model is blessed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.evaluate import run
from components.spec.step import configure_logging, exit_code_of, publish, spec_and_store, step_parser
from components.store import open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step. The exit code is the table's; `not_blessed` is an answer, not a failure: see the output's word."""
    parser = step_parser(__doc__ or "")
    parser.add_argument("--run-id", required=True, help="the run whose model is scored")
    arguments = parser.parse_args(argv)
    configure_logging()

    def body() -> None:
        spec, url = spec_and_store(arguments)
        publish(run(spec, arguments.run_id, open_store(url)).model_dump(mode="json"), arguments.output)

    return exit_code_of(body)


if __name__ == "__main__":
    sys.exit(main())
