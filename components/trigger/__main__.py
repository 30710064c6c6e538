"""`python -m holdfast.components.trigger --spec SPEC`: whether a retraining is due. The result has the word."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from holdfast.components.runtime.argv import step_parser
from holdfast.components.runtime.shell import run_main
from holdfast.components.spec import ExitCode, Spec
from holdfast.components.store import open_store
from holdfast.components.store.jobs import recorder
from holdfast.components.trigger import Decision, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step and return its exit code: 0 whatever the word, unless --exit-code asks for 4 when nothing is due."""
    parser = step_parser(__doc__ or "")
    parser.add_argument("--salt", default="", help="what makes the retraining another run with the same inputs")
    parser.add_argument("--exit-code", action="store_true", help=f"end with {ExitCode.NOT_DUE:d} when nothing is due")
    arguments = parser.parse_args(argv)
    decisions: list[Decision] = []

    def body(spec: Spec, url: str) -> tuple[dict[str, Any], str]:
        decision = run(spec, open_store(url), arguments.salt)
        decisions.append(decision)
        return decision.model_dump(mode="json"), f"{decision.word}: {decision.reason}"

    code = run_main("trigger", arguments, body, recorder(arguments.job))
    return ExitCode.NOT_DUE if arguments.exit_code and decisions and not decisions[0].due else code


if __name__ == "__main__":
    sys.exit(main())
