"""The contract of trackers: copies of a run's committed history outside the store.

A tracker reads the history from the store, so no step waits for one, and any process can continue the copy. `open_all`
opens the trackers that a spec lists.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from holdfast.spec import Spec
from holdfast.store import Store

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """One tracker of one run. Only `log_evaluation` and `log_figures` raise TrackingUnavailable; the other methods log
    a failure once, and the next call copies what is missing."""

    @property
    def name(self) -> str:
        """The name in messages."""

    def begin(self) -> None:
        """Create the run at the tracker, before its first row."""

    def sync(self) -> int:
        """Copy the committed rows that the tracker does not have, each once. Returns their number."""

    def finish(self, status: Status) -> bool:
        """Copy the missing rows, and end the run with `status`. Returns whether the tracker has all of it."""

    def log_evaluation(self, verdict: Mapping[str, Any]) -> None:
        """Write the metrics of a verdict, named `evaluation/...`, and its outcome."""

    def log_figures(self, figures: Mapping[str, float]) -> None:
        """Write figures of the whole run, such as its goodput."""


def open_all(spec: Spec, run_id: str, dataset_id: str, store: Store) -> list[Tracker]:
    """The trackers of `telemetry.trackers`, in its order. Makes no request and imports no tracker's package."""
    from holdfast.tracking.history_copy import HistoryCopy
    from holdfast.tracking.tracker import RunTracker
    from holdfast.tracking.trackio_target import TrackioTarget
    from holdfast.tracking.wandb_target import WandbTarget

    opened: dict[str, Callable[[], Tracker]] = {
        "mlflow": lambda: RunTracker.open(spec, run_id, dataset_id, store),
        "wandb": lambda: HistoryCopy(spec, run_id, store, WandbTarget(spec, run_id)),
        "trackio": lambda: HistoryCopy(spec, run_id, store, TrackioTarget(spec, run_id)),
    }
    return [opened[name]() for name in spec.telemetry.trackers]
