"""torchrun with an exit code that means something: `python -m holdfast.components.launch.torchrun [flags] -m module …`.

Takes torchrun's own flags and PET_ variables, so a PyTorchJob configures it as it configures torchrun. Where
HOLDFAST_ENDINGS names a folder, the code of this node goes there too, as the ranks' codes go to this node's own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from holdfast.components.launch.ending import (
    FOLDER_VARIABLE,
    as_exit_code,
    killed_ranks,
    leave_ending,
    recorded_endings,
    root_cause,
)
from holdfast.components.launch.orphan import die_with_parent, lead_children
from holdfast.components.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")


def main(arguments: list[str]) -> int:
    """Run the gang's processes on this node; the code of the table that explains how they ended."""
    die_with_parent()
    lead_children()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    nodes = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        codes: list[int] = []
        try:
            try:
                run(parse_args(arguments))
            finally:  # nothing is left to stop, and what follows says why: a signal must not replace it
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
        except ChildFailedError as error:
            codes = [as_exit_code(failure.exitcode) for failure in error.failures.values()]
        except SignalException as error:  # told to stop: how the ranks left says more, and which were dead by then
            codes = [ExitCode.KILLED] * killed_ranks(Path(folder))
            if not codes and not recorded_endings(Path(folder)):
                codes = [128 + int(error.sigval)]
        except (RendezvousError, DistError) as error:  # the other nodes, or the one that hosts the rendezvous
            log.error("the nodes could not meet: %s", error)
            codes = [ExitCode.LOST_PEER]
        code = root_cause(codes + recorded_endings(Path(folder)))
    if nodes:
        leave_ending(Path(nodes) / os.environ.get("PET_NODE_RANK", "0"), code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
