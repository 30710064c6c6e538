"""`python -m holdfast.components.register --spec S --run-id R`: register the model of a finished, blessed run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.components.register import run
from holdfast.components.runtime.argv import step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import Spec
from holdfast.components.store import open_store
from holdfast.components.store.jobs import recorder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step; the exit code is the table's."""
    parser = step_parser(__doc__ or "")
    parser.add_argument("--run-id", required=True, help="the run whose model is registered")
    parser.add_argument("--verdict", help="key of the verdict to go by; default: the newest")
    arguments = parser.parse_args(argv)

    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        registration = run(spec, arguments.run_id, open_store(url), arguments.verdict)
        return asdict(registration), str(registration.version)

    return run_main("register", arguments, body, recorder(arguments.job))


if __name__ == "__main__":
    sys.exit(main())
