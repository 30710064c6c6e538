"""`python -m holdfast.components.notify --status failed`: say what became of a DAG. Always ends with 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from holdfast.components.notify import run
from holdfast.components.notify.failures import first_failed_node
from holdfast.components.runtime.argv import add_result_arguments, overrides_of, publish
from holdfast.components.runtime.outcomes import first_failure, run_of
from holdfast.components.runtime.shell import run_exit_handler
from holdfast.components.store.jobs import outcomes_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--status", required=True, help="how the DAG ended: succeeded, failed or cancelled")
    parser.add_argument("--spec", type=Path, help="the spec file; it may be missing or broken")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the spec")
    parser.add_argument("--overrides", default="[]", metavar="JSON", help="overrides in one argument, before --set")
    parser.add_argument("--store", default="", help="root of the store; default: as for every step")
    parser.add_argument("--salt", default="", help="what made it another run with the same inputs")
    parser.add_argument("--run-id", default="", help="the run, if it is known")
    parser.add_argument("--failed-step", default="", help="the step that failed")
    parser.add_argument("--message", default="", help="what it said")
    parser.add_argument("--failures", default="", metavar="JSON", help="what Argo's workflow.failures says")
    parser.add_argument("--log", default="", help="where its log is: a path or a URL")
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)

    run_exit_handler("notify", lambda: _notify(arguments))  # its failure is in the log; the DAG's own outcome stands
    return 0


def _notify(arguments: argparse.Namespace) -> None:
    text = arguments.spec.read_text(encoding="utf-8", errors="replace") if _is_file(arguments.spec) else ""
    overrides = overrides_of(arguments)
    outcomes = outcomes_of(arguments.job, text, overrides, arguments.store)
    ended_well = arguments.status.lower() == "succeeded"
    node, said = first_failed_node(arguments.failures)
    code = None
    # What a step said itself is better than what the cluster says of its pod.
    if not ended_well and (failure := first_failure(outcomes)) is not None:
        node, said, code = failure.step, failure.reason, failure.exit_code
    not_due = next((one.result for one in outcomes if one.step == "trigger" and one.result.startswith("not_due")), "")
    if ended_well and not_due:  # nobody is told that nothing happened
        return publish({"text": f"**{not_due}**\n", "status": "succeeded"}, arguments.output, arguments.outputs)
    summary = run(
        arguments.status,
        text,
        arguments.store,
        arguments.run_id or run_of(outcomes, text, overrides, arguments.salt),
        overrides=overrides,
        failed_step=arguments.failed_step or node,
        message=arguments.message or said,
        exit_code=code,
        log_place=arguments.log,
    )
    return publish({"text": summary.text, **asdict(summary)}, arguments.output, arguments.outputs)


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


if __name__ == "__main__":
    sys.exit(main())
