"""torchrun with an exit code that means something: `python -m holdfast.components.launch.torchrun [flags] -m module …`.

The ranks run the module's `main()`, forked from a process that has imported it: importing it must do nothing else.
Takes torchrun's own flags and PET_ variables, so a PyTorchJob configures it as it configures torchrun. Where
HOLDFAST_ENDING_FILE names a file, how this node ended goes there too, as a typed record.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast.components.launch.ending import FOLDER_VARIABLE, as_exit_code, ending_of, leave_ending, read_ranks
from holdfast.components.launch.orphan import die_with_parent, lead_children
from holdfast.components.launch.warm import WarmServer
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

    given = parse_args(arguments)
    if given.module and not given.no_python:
        _start_ranks_warm(given.training_script)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        codes: list[int] = []
        try:
            try:
                run(given)
            finally:  # nothing is left to stop, and what follows says why: a signal must not replace it
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
        except ChildFailedError as error:
            codes = [as_exit_code(failure.exitcode) for failure in error.failures.values()]
        except SignalException as error:  # told to stop: how the ranks left says more, and which were dead by then
            ranks = read_ranks(Path(folder))
            codes = [ExitCode.KILLED for rank in ranks if rank.attempt is not None and rank.code is None]
            if not codes and all(rank.code is None for rank in ranks):
                codes = [128 + int(error.sigval)]
        except (RendezvousError, DistError) as error:  # the other nodes, or the one that hosts the rendezvous
            log.error("the nodes could not meet: %s", error)
            codes = [ExitCode.LOST_PEER]
        ending = ending_of(read_ranks(Path(folder)), codes)
    leave_ending(ending)
    return ending.code


def _start_ranks_warm(module: str) -> None:
    """Have torchrun fork the ranks, now and after each failure, instead of starting an interpreter for each. Before
    anything else: the meeting of the nodes starts threads."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    try:
        server = WarmServer.fork([module])
    except RuntimeError as error:
        log.warning("every rank imports torch itself: %s", error)
        return

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
            if args[:4] != (sys.executable, "-u", "-m", module):  # bound to the cores of its accelerator by numactl
                return super()._popen(args, env)
            stdout, stderr = (None if stream is None else stream.fileno() for stream in (self._stdout, self._stderr))
            return server.start(module, args[4:], env, stdout, stderr)  # type: ignore[return-value]  # all of it in use

    api.get_subprocess_handler = Handler  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
