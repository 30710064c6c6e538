"""`python -m holdfast.components.evaluate --spec S --run-id R`: score a finished run, bless its model or not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.components.evaluate import run
from holdfast.components.runtime.argv import step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import Spec
from holdfast.components.store import layout, open_store
from holdfast.components.store.jobs import recorder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step. The exit code is the table's; `not_blessed` is an answer, not a failure: see the output's word."""
    parser = step_parser(__doc__ or "")
    parser.add_argument("--run-id", required=True, help="the run whose model is scored")
    parser.add_argument("--report", type=Path, help="also write the HTML report there")
    arguments = parser.parse_args(argv)

    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        store = open_store(url)
        verdict = run(spec, arguments.run_id, store)
        if arguments.report:
            arguments.report.parent.mkdir(parents=True, exist_ok=True)
            arguments.report.write_bytes(store.get(layout.verdict(verdict.run_id, verdict.key, "html")))
        return verdict.model_dump(mode="json"), verdict.word

    return run_main("evaluate", arguments, body, recorder(arguments.job))


if __name__ == "__main__":
    sys.exit(main())
