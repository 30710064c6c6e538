"""The examination as a program, which `holdfast.launch.torchrun` starts on every accelerator.

Rank 0 writes the report as JSON. The exit code is 0 if no rank failed. Otherwise a failed rank exits with its error's
code, and its node is blamed.
"""

import argparse
import sys
from pathlib import Path

from holdfast.collectives import Gang, noticing_lost_peers
from holdfast.health.examine import examine, require_health
from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.device import join_gang, local_device
from holdfast.launch.exits import RankRecord
from holdfast.launch.processes import die_with_parent
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.exits import exit_code_of
from holdfast.runtime.logs import configure_logging
from holdfast.spec import ExitCode
from holdfast.store import open_store

PREFIX = "health/"  # prefix of the keys in the store, since the nodes belong to no run


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="cpu", choices=sorted(ACCELERATORS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--store", default="", help="the store to probe, by its URL; none probes none")
    parser.add_argument("--report", type=Path, help="the file that rank 0 writes the report to; none: standard output")
    arguments = parser.parse_args()
    die_with_parent()
    record = RankRecord()
    configure_logging()

    def body() -> None:
        device = local_device(arguments.accelerator)
        with noticing_lost_peers():
            join_gang(device)
            gang = Gang()
            store = open_store(arguments.store) if arguments.store else None
            report = examine(gang, device, store, PREFIX, cache_dir(), arguments.seconds, "requested")
        if gang.rank == 0:
            if arguments.report is None:
                sys.stdout.write(report.model_dump_json() + "\n")
            else:
                arguments.report.write_text(report.model_dump_json(), encoding="utf-8")
        gang.barrier()  # a rank that leaves before all have the report would be a lost peer
        require_health(report, gang.rank)

    code = exit_code_of(body)
    record.exit(code, blames_node=code in (ExitCode.UNHEALTHY_NODE, ExitCode.WRONG_ARITHMETIC))


if __name__ == "__main__":
    main()
