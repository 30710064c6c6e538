"""The copy of a run's history at a tracker other than MLflow: committed rows, each once, from any process."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from holdfast.runtime.secrets import redact
from holdfast.spec import HoldfastError, Spec
from holdfast.store import Store
from holdfast.telemetry import read_history
from holdfast.tracking.connection import TrackingUnavailable
from holdfast.tracking.failures import is_bug
from holdfast.tracking.interface import Status
from holdfast.tracking.tracker import EVALUATION, is_copied, metrics_of, numbers

log = logging.getLogger("holdfast.tracking")


class StepMetrics(NamedTuple):
    """The metrics of one step."""

    step: int
    time: float  # Unix seconds
    metrics: dict[str, float]


class CopyTarget(Protocol):
    """Where a history is copied to. A method raises what the tracker's package raises."""

    name: str
    interval: float  # seconds between two copies, at least

    def last_step(self) -> int:
        """The last step that the target has; 0 where a point that is written again changes nothing."""

    def write(self, points: Sequence[StepMetrics]) -> None:
        """Write the points, all of them or a first part. A process may die at any moment in between."""

    def summarize(self, figures: Mapping[str, float | str]) -> None:
        """Write figures of the whole run. The same figures written again change nothing."""

    def close(self, status: Status | None) -> None:
        """Flush, and release the run. `status` is how it ended, or None if that is not known."""


@dataclass
class HistoryCopy:
    """The copy of one run's history at `target`. It makes no request before `begin`."""

    spec: Spec
    run_id: str
    store: Store
    target: CopyTarget
    _last_step: int | None = None  # every step up to it is copied, or is not to be copied; None: not known yet
    _copied_at: float = field(default_factory=time.monotonic)
    _failed: bool = False

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.target.name

    def begin(self) -> None:
        """Nothing: the run is created with its first rows."""

    def sync(self) -> int:
        """Copy new rows, unless the last copy is less than `interval` seconds old."""
        if time.monotonic() - self._copied_at < self.target.interval:
            return 0
        return self._try_to_copy() or 0

    def finish(self, status: Status) -> bool:
        """Copy the missing rows, and close the run at the tracker."""
        if self._try_to_copy() is None:
            return False
        try:
            self.target.close(status)
        except Exception as error:  # noqa: BLE001 - a package of others; the store has the rows
            self._miss(error)
            return False
        return True

    def log_evaluation(self, verdict: Mapping[str, Any]) -> None:
        """Copy missing rows, and write the verdict into the summary. Raises TrackingUnavailable."""
        figures: dict[str, float | str] = dict(numbers(verdict.get("metrics") or {}, EVALUATION))
        try:
            self._copy()
            self.target.summarize({**figures, "holdfast.verdict": str(verdict["word"])})
            self.target.close(None)
        except Exception as error:
            raise self._unavailable(error) from error

    def log_figures(self, figures: Mapping[str, float]) -> None:
        """Write figures into the summary. Raises TrackingUnavailable."""
        try:
            self.target.summarize(dict(figures))
            self.target.close(None)
        except Exception as error:
            raise self._unavailable(error) from error

    def _try_to_copy(self) -> int | None:
        """Copy the missing rows; None after a failure, which is logged once until a copy succeeds."""
        try:
            copied = self._copy()
        except Exception as error:  # noqa: BLE001 - a package of others; the store has the rows
            self._miss(error)
            return None
        if self._failed:
            log.info("%s is back; %d steps copied", self.name, copied)
        self._failed = False
        return copied

    def _copy(self) -> int:
        rows = read_history(self.store, self.run_id, after=self._last_step or 0)
        self._copied_at = time.monotonic()
        if not rows:
            return 0
        if self._last_step is None:
            self._last_step = self.target.last_step()
        new = [row for row in rows if row["step"] > (self._last_step or 0)]
        steps = self.spec.training.steps
        copied = [row for row in new if is_copied(row["step"], steps)]
        points = [StepMetrics(int(row["step"]), float(row["time"]), metrics_of(row)) for row in copied]
        if points:
            self.target.write(points)
        self._last_step = int(rows[-1]["step"])
        return len(points)

    def _miss(self, error: Exception) -> None:
        if not self._failed:
            log.warning(
                "metrics are not copied to %s for now, they are safe in the store: %s", self.name, _first_line(error)
            )
        self._failed = True

    def _unavailable(self, error: Exception) -> Exception:
        if isinstance(error, HoldfastError) or is_bug(error):
            return error
        return TrackingUnavailable(f"{self.name}: {_first_line(error)}; the next copy tries again")


def _first_line(error: Exception) -> str:
    return redact(str(error)).strip().partition("\n")[0][:500] or type(error).__name__
