"""A rank with a fault: `python -m tests.faults.odd_worker HOW ...`, followed by a worker's arguments.

`pauses-in-FOLDER` pauses at the first roots that its garbage collection deletes, until the file FOLDER/go appears.
`leaves-at-load` gets a stop request while it loads. `leaves-at-6` gets a stop request after it saved step 6.
`computes-wrong` finds that its arithmetic differs from that of another rank.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.rank import worker
from holdfast.spec.errors import WrongArithmeticError
from holdfast.store.file import FileStore


def _pause(folder: Path) -> None:
    delete = FileStore.delete_many

    def paused(store: FileStore, keys: Sequence[str]) -> None:
        if "/checkpoints/" in keys[0] and not (folder / "paused").exists():
            (folder / "paused").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)
        return delete(store, keys)

    FileStore.delete_many = paused  # type: ignore[method-assign, assignment]


def _leave_at_load() -> None:
    restore = worker.Checkpointer.restore

    def stopped(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return restore(*arguments)

    worker.Checkpointer.restore = stopped  # type: ignore[method-assign, assignment]


def _leave_at(last: int) -> None:
    save = worker.Checkpointer.save

    def stopped(self: Any, step: int, *arguments: Any, **more: Any) -> None:
        save(self, step, *arguments, **more)
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    worker.Checkpointer.save = stopped  # type: ignore[method-assign]


def _compute_wrong() -> None:
    def work(*_: Any) -> None:
        raise WrongArithmeticError("step 6: rank 0 differs")

    worker.work = work  # type: ignore[assignment]


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if how.startswith("pauses-in-"):
        _pause(Path(how.removeprefix("pauses-in-")))
    elif how == "leaves-at-load":
        _leave_at_load()
    elif how == "computes-wrong":
        _compute_wrong()
    else:
        _leave_at(int(how.removeprefix("leaves-at-")))
    worker.main()
