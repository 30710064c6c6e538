"""A rank that does `DEED` while the gang has two ranks: it exits with that code, or is `kill`ed. The code of a lost
peer comes after the peer has begun. A rank that is alone exits with 0 if there were two before, and waits for the
other one if not."""

import os
import signal
import threading
import time
from pathlib import Path

from holdfast.launch.exits import RankRecord
from holdfast.launch.processes import die_with_parent
from holdfast.spec import ExitCode


def main() -> None:
    die_with_parent()
    record = RankRecord()
    record.formed(1)
    code, marker = 0, Path(os.environ["MET"])
    if os.environ["WORLD_SIZE"] == "1":
        if not marker.exists():
            threading.Event().wait(240)
    else:
        if os.environ["DEED"] == str(int(ExitCode.LOST_PEER)):
            while not marker.exists():
                time.sleep(0.02)
        marker.touch()
        if os.environ["DEED"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait(120)
        code = int(os.environ["DEED"])
    record.ended(code)
    os._exit(code)


if __name__ == "__main__":
    main()
