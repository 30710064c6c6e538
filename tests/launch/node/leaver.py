"""A rank of an elastic gang: it trains until it has to leave (SIGTERM), or until the file `end` exists."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from holdfast.launch.exits import RankRecord
from holdfast.launch.processes import die_with_parent
from holdfast.spec import ExitCode


def main() -> None:
    die_with_parent()
    record, folder, leaving = RankRecord(), Path(os.environ["FOLDER"]), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))
    record.formed(1)
    with (folder / "ranks").open("a") as ranks:
        ranks.write(f"{os.environ['WORLD_SIZE']}\n")
    while not leaving and not (folder / "end").exists():
        time.sleep(0.02)
    code = ExitCode.PREEMPTED if leaving else ExitCode.OK
    record.ended(code)
    os._exit(code)


if __name__ == "__main__":
    main()
