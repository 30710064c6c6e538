"""What the tests run in processes of their own: `python -m tests.tracking.worker STORE_URL`, go on a line of input."""

from __future__ import annotations

import sys

from holdfast.components.store import open_store
from holdfast.components.tracking import RunTracker
from tests.tracking import made

if __name__ == "__main__":
    tracker = RunTracker.open(made.spec(), made.RUN_ID, made.DATASET_ID, open_store(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    print(tracker.sync(), tracker.mlflow_run_id, flush=True)
