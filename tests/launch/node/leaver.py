"""A rank of an elastic gang: it runs until it has to leave (SIGTERM), or until the test ends the run (SIGUSR1)."""

import os
import signal
from pathlib import Path

from holdfast.launch.exits import RankRecord
from holdfast.launch.processes import die_with_parent
from holdfast.spec import ExitCode

END = signal.SIGUSR1


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, END})
    die_with_parent()
    record = RankRecord()
    record.formed(1)
    with (Path(os.environ["FOLDER"]) / "ranks").open("a") as ranks:
        ranks.write(f"{os.environ['WORLD_SIZE']} {os.getpid()}\n")
    code = ExitCode.OK if signal.sigwait({signal.SIGTERM, END}) == END else ExitCode.PREEMPTED
    record.ended(code)
    os._exit(code)


if __name__ == "__main__":
    main()
