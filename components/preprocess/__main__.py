"""`python -m components.preprocess --spec SPEC`: prepare the dataset of a spec."""

from __future__ import annotations

import sys

from components.preprocess.step import run
from components.spec.step import configure_logging, exit_code_of, publish, spec_and_store, step_parser
from components.store import open_store


def main(argv: list[str] | None = None) -> int:
    """Run the step and return its exit code."""
    arguments = step_parser("Turn the sources of a spec into a dataset of packed tokens.").parse_args(argv)
    configure_logging()

    def body() -> None:
        spec, url = spec_and_store(arguments)
        publish(run(spec, open_store(url)).model_dump(mode="json"), arguments.output)

    return exit_code_of(body)


if __name__ == "__main__":
    sys.exit(main())
