"""Optimizer steps of a script that `session.step` does not report: a warning, and the end of a verification."""

import logging
from collections import Counter

from holdfast.script.tree import StateError
from holdfast.telemetry import emit
from holdfast.telemetry.events import WarningIssued

log = logging.getLogger("holdfast.script")

UNREPORTED_UPDATES = 100  # optimizer steps without session.step, after which a warning is due


class UnreportedUpdates:
    """Counts the steps of each optimizer between `session.restore` and the first `session.step`."""

    def __init__(self, *, reports: bool, verifies: bool) -> None:
        self._reports, self._verifies = reports, verifies
        self._counts: Counter[int] = Counter()  # by the id of the optimizer

    def count(self, optimizer: object) -> None:
        """Count one step. The rank that `reports` warns once. Raises StateError in a verification, which would last as
        long as the whole run."""
        self._counts[id(optimizer)] += 1
        if self._counts[id(optimizer)] != UNREPORTED_UPDATES:
            return
        message = (
            f"the script made {UNREPORTED_UPDATES} optimizer steps after session.restore without session.step: "
            "nothing is saved, and a failure repeats them; call session.step(step + 1) after each optimizer step"
        )
        if self._verifies:
            raise StateError(message)
        if self._reports:
            log.warning("%s", message)
            emit(WarningIssued(message=message))
