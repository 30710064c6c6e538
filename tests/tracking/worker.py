"""Separate processes of the tests: `python -m tests.tracking.worker STORE_URL [BATCHES]` starts at a line of input.
After BATCHES batches of metrics, if given, it only waits."""

import signal
import sys

from holdfast.store import open_store
from holdfast.tracking import RunTracker
from tests.tracking import made


def hold_after(batches: int) -> None:
    """Write that many batches, and wait to be killed."""
    from mlflow import MlflowClient

    log_batch, count = MlflowClient.log_batch, [0]

    def held(*arguments: object, **named: object) -> object:
        if named.get("metrics"):
            count[0] += 1
            if count[0] > batches:
                signal.pause()
        return log_batch(*arguments, **named)

    MlflowClient.log_batch = held


if __name__ == "__main__":
    tracker = RunTracker.open(made.spec(), made.RUN_ID, made.DATASET_ID, open_store(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    for batches in sys.argv[2:]:
        hold_after(int(batches))
    print(tracker.sync(), tracker.mlflow_run_id, flush=True)
