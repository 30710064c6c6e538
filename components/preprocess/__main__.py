"""`python -m holdfast.components.preprocess --spec SPEC`: prepare the dataset of a spec."""

from __future__ import annotations

import sys
from typing import Any

from holdfast.components.preprocess import run
from holdfast.components.runtime.argv import step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import Spec
from holdfast.components.store import open_store
from holdfast.components.store.jobs import recorder


def main(argv: list[str] | None = None) -> int:
    """Run the step and return its exit code."""
    arguments = step_parser("Turn the sources of a spec into a dataset of packed tokens.").parse_args(argv)

    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        prepared = run(spec, open_store(url))
        return prepared.model_dump(mode="json"), prepared.dataset_id

    return run_main("preprocess", arguments, body, recorder(arguments.job))


if __name__ == "__main__":
    sys.exit(main())
