"""One rank of the replay of a training script: runs it from a checkpoint, and records the rows of its steps.

`audit.replay_job` starts as many ranks as the run had. The code and the arguments come from the command line, as those
of a training rank do. The session of the script is `holdfast.script.replay`.
"""

import argparse
import sys
from pathlib import Path

from holdfast.audit.rank_arguments import replay_parser
from holdfast.code import fetch_code
from holdfast.collectives import noticing_lost_peers
from holdfast.launch.exits import RankRecord
from holdfast.launch.launches import read_launch
from holdfast.launch.processes import die_with_parent
from holdfast.rank.preemption import PreemptionSignal
from holdfast.runtime.exits import exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.script import session as sessions
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.inputs import fetch_inputs
from holdfast.script.process import meet_by_file, run_entry, split_arguments
from holdfast.script.replay import Replay, ReplayLaunch
from holdfast.spec.plan import Plan
from holdfast.store import open_store


def main() -> None:
    """Entry point of a rank."""
    own, arguments = split_arguments(sys.argv[1:])
    parser = replay_parser(__doc__)
    parser.add_argument("--code", required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--inputs", default="")
    options = parser.parse_args(own)
    die_with_parent()
    record = RankRecord()
    configure_logging()
    record.exit(exit_code_of(lambda: _replay(options, arguments, record)))


def _replay(options: argparse.Namespace, arguments: list[str], record: RankRecord) -> None:
    plan = None if options.plan is None else Plan.model_validate_json(options.plan.read_bytes())
    store = open_store(options.root)
    launched = read_launch(store, options.of, options.launch)
    assignment = ScriptAssignment.recorded(launched.assignment, f"launch {options.launch} of run {options.of}")
    entry = fetch_code(store, options.code) / options.entry
    inputs = fetch_inputs(options.inputs)
    meet_by_file()
    sessions.launched = ReplayLaunch(
        store,
        options.launch,
        launched.claimed,
        replan=False,
        assignment=assignment,
        code=options.code,
        leave=PreemptionSignal(),
        record=record,
        inputs=inputs,
        replay=Replay(options.from_step, options.to_step, Path(options.results), options.state_digest, plan),
    )
    with noticing_lost_peers():
        run_entry(entry, arguments, assignment.restart_on)


if __name__ == "__main__":
    main()
