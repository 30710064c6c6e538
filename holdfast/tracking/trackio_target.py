"""Trackio: the history of a run as rows of the SQLite file of its project.

Each row carries an id made of run and step, which Trackio keeps unique. So a row that is written again changes nothing,
whichever process writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from holdfast.spec import Spec, digest

if TYPE_CHECKING:
    from holdfast.tracking.history_copy import StepMetrics
    from holdfast.tracking.interface import Status

_BATCH = 1000  # rows of one transaction


class TrackioTarget:
    """One run of the Trackio project that is named as the spec's experiment, under TRACKIO_DIR."""

    name = "Trackio"
    interval = 0.0

    def __init__(self, spec: Spec, run_id: str) -> None:
        self._spec, self._run_id = spec, run_id
        self._last = (0, 0.0)  # step and time of the last written point

    def last_step(self) -> int:
        """0: Trackio ignores rows that it has."""
        return 0

    def write(self, points: Sequence[StepMetrics]) -> None:
        """Write the points in transactions of `_BATCH` rows."""
        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            self._log(batch, [f"{self._run_id}:{point.step}" for point in batch])
        self._last = (points[-1].step, points[-1].time)

    def summarize(self, figures: Mapping[str, float | str]) -> None:
        """Add the figures as one more row of the last step."""
        from holdfast.tracking.history_copy import StepMetrics

        point = StepMetrics(*self._last, dict(figures))  # type: ignore[arg-type]
        self._log([point], [f"{self._run_id}:{digest(dict(figures))}"])

    def close(self, status: Status | None) -> None:
        """Nothing: each transaction is complete."""

    def _log(self, points: Sequence[StepMetrics], ids: list[str]) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.bulk_log(
            project=self._spec.experiment,
            run=f"{self._spec.name}-{self._run_id[:8]}",
            metrics_list=[point.metrics for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            config=self._spec.model_dump(mode="json"),
            log_ids=ids,
            run_id=self._run_id,
        )
