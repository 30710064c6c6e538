"""A rank of a gang that loses a node. It trains until the file `lost` exists, and then has lost a peer. The ranks of
the next gang exit with the code in ENDS once the file `end` exists; on failure, the host's rank waits for `last`
too."""

import os
import time
from pathlib import Path

from holdfast.launch.exits import RankRecord
from holdfast.launch.processes import die_with_parent
from holdfast.spec import ExitCode


def main() -> None:
    die_with_parent()
    record = RankRecord()
    record.formed(1)
    folder, name, rank = Path(os.environ["FOLDER"]), os.environ["NAME"], os.environ["RANK"]
    is_second = (folder / "lost").exists()
    with (folder / "gangs").open("a") as gang_log:
        gang_log.write(f"{'second' if is_second else 'first'} {name} {rank}/{os.environ['WORLD_SIZE']}\n")
    while not (folder / ("end" if is_second else "lost")).exists() and not (folder / "end").exists():
        time.sleep(0.02)
    trained = (folder / "end").exists()
    while trained and name == "host" and os.environ["ENDS"] != "0" and not (folder / "last").exists():
        time.sleep(0.02)
    code = int(os.environ["ENDS"]) if trained else ExitCode.LOST_PEER
    record.ended(code)
    os._exit(code)


if __name__ == "__main__":
    main()
