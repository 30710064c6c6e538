"""A process of the tests that copies a history: `python -m tests.tracking.copier STORE_URL TRACKER [POINTS]`. After
POINTS points, if given, it prints `held` and waits to be killed."""

import signal
import sys
from collections.abc import Callable

from holdfast.store import open_store
from holdfast.tracking.interface import open_all
from tests.tracking import made


def hold_after(points: int, write: Callable[..., object]) -> Callable[..., object]:
    """`write`, which waits at its call number `points`, before or after it."""
    count = [0]

    def held(*arguments: object, **named: object) -> object:
        count[0] += 1
        if count[0] == points and points % 2:
            wait()
        result = write(*arguments, **named)
        if count[0] == points:
            wait()
        return result

    return held


def wait() -> None:
    print("held", flush=True)
    signal.pause()


def main(url: str, name: str, points: int) -> None:
    if points and name == "wandb":
        from wandb import Run

        Run.log = hold_after(points, Run.log)
    elif points:
        from trackio.sqlite_storage import SQLiteStorage

        from holdfast.tracking import trackio_target

        trackio_target._BATCH = 2

        SQLiteStorage.bulk_log = staticmethod(hold_after(points, SQLiteStorage.bulk_log))
    spec = made.spec(f"telemetry.trackers=[{name}]")
    (tracker,) = open_all(spec, made.RUN_ID, made.DATASET_ID, open_store(url))
    assert tracker.finish("FINISHED")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int((sys.argv[3:] or ["0"])[0]))
