"""Session of a replay: it computes recorded steps of a script again, and saves nothing.

The script runs unchanged. It restores the checkpoint before the steps, and ends after the last of them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.reader import require_state
from holdfast.rank.plan import require_recorded_plan
from holdfast.script.history import ScriptHistory
from holdfast.script.interface import StopExit
from holdfast.script.session import Launched, ManagedSession
from holdfast.script.state import ScriptState
from holdfast.script.tree import StateError
from holdfast.spec.plan import Plan
from holdfast.telemetry import phases


@dataclass(frozen=True)
class Replay:
    """The steps above `start` up to `last` of a run, and where their rows go."""

    start: int  # step of a checkpoint; 0: the first state
    last: int
    results: Path  # JSON lines, appended by rank 0
    state_digest: str = ""  # of the checkpoint at `start`; empty: not checked
    plan: Plan | None = None  # of the run; None: any plan is accepted


@dataclass(frozen=True, kw_only=True)
class ReplayLaunch(Launched):
    """The launch that runs this process, which replays a part of a run."""

    replay: Replay

    def session(self, seed: int | None, seed_rank: int | None) -> ManagedSession:
        """See Launched."""
        return ReplaySession(self, seed, seed_rank)


class ReplaySession(ManagedSession):
    """The session of a rank that replays steps. It claims no attempt and writes only a reader's mark to the store."""

    def __init__(self, launched: ReplayLaunch, seed: int | None = None, seed_rank: int | None = None) -> None:
        super().__init__(launched, seed, seed_rank)
        self._replay = launched.replay

    def restore(self, *, per_rank: Mapping[str, Any] = {}, steps: int | None = None, **state: Any) -> int:
        """See Session. Raises PlanChangedError if this machine computes differently from the run, and DataError if the
        checkpoint was replaced."""
        _, plan = self._meet()
        replay, assignment = self._replay, self._assignment
        if replay.plan is not None:
            require_recorded_plan(replay.plan, plan)
        phases.enter("restore")
        self._state = ScriptState(dict(state), dict(per_rank), self._gang)
        if replay.start:
            checkpoint = open_checkpoint(self._launched.store, self.run_id, replay.start)
            require_state(checkpoint.manifest, replay.state_digest)
            with checkpoint.marked():
                checkpoint.fill(self._state.boxes(checkpoint.tensors))
            self._state.adopt()
        self._step = self._started = replay.start
        self._history = ScriptHistory(
            self.run_id, 0, replay.start, keep=False, steps=steps, log_every=assignment.log_every, diverges=False
        )
        self._next(replay.start)
        return replay.start

    def step(self, step: int, /, **metrics: float | Tensor) -> None:
        """See Session. Ends the script after the last step."""
        self._count(step)
        phases.enter("check", step)
        digest = self._state_digest(step)
        self._write()
        self._history.add(step, metrics, digest, phases.lap(), self.epoch if self._has_epochs else None)
        if step == self._replay.last:
            self._write()
            raise StopExit(0)
        self._next(step)

    def save(self, step: int) -> None:
        """See Session. Saves nothing."""

    def due(self, step: int) -> bool:  # noqa: ARG002
        """See Session."""
        return False

    def should_stop(self) -> bool:
        """See Session."""
        return False

    def export(self, what: nn.Module | str | Path | Callable[[Path], object], *, step: int | None = None) -> None:
        """See Session. Exports nothing."""

    def newest_step(self) -> int:
        """The step that `restore` loads."""
        return self._replay.start

    def finish(self) -> None:
        """See ManagedSession. Raises StateError for a script that ended before the last step."""
        if self._step != self._replay.last:
            raise StateError(
                f"the script ended at step {self._step}, and run {self.run_id} has recorded step {self._replay.last}: "
                "its length depends on something that is not in its code or arguments"
            )

    def _write(self) -> None:
        """Write the rows of finished steps. A row may get metrics until the next step is done."""
        rows = self._history.drain()
        if self._gang.rank == 0 and rows:
            with self._replay.results.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
