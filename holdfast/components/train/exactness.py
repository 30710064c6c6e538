"""Verification of a training script: whether it resumes with the bits of an undisturbed run.

One run makes some steps in one launch. Another one is stopped on the way, and resumes in a new launch. Rows, tensors
and plain values after the last step are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.checkpoint.lineage import newest_step
from holdfast.checkpoint.tools.difference import differences
from holdfast.components.train.script import nothing_saved
from holdfast.components.train.step import run_gang
from holdfast.launch import choose_launcher
from holdfast.runtime.environment import log_dir
from holdfast.script.assignment import ScriptAssignment
from holdfast.script.state import TREE
from holdfast.script.tree import StateError, differing_paths, from_bytes
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import NotExactError
from holdfast.store import Store
from holdfast.telemetry import Row, read_history

_SHOWN = 5
# Fields of a row that are measured, and differ from attempt to attempt.
_MEASURED = ("time", "step_seconds", "system.", "phase_seconds.")


@dataclass(frozen=True)
class Exactness:
    """Result of a verification."""

    steps: int
    resumed_at: int
    rows: tuple[str, ...] = ()  # metrics that differ, in words
    values: tuple[str, ...] = ()  # paths of plain values that differ, in words
    tensors: tuple[str, ...] = ()  # names of tensors that differ

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return not (self.rows or self.values or self.tensors)

    def require(self) -> None:
        """Raises NotExactError with the first differences and the likely cause."""
        if self.is_exact:
            return
        named = {"metrics": self.rows, "values": self.values, "tensors": self.tensors}
        found = "; ".join(f"{kind}: {', '.join(names[:_SHOWN])}" for kind, names in named.items() if names)
        raise NotExactError(
            f"resumed at step {self.resumed_at}, the script differs from an undisturbed run by step {self.steps}. "
            f"{found}. Give session.restore every object that changes in training, draw random numbers only from "
            "torch, numpy, random or session.generator, and read the same data at the same step"
        )


def verify_script(spec: Spec, store: Store, steps: int, resume_at: int) -> Exactness:
    """Run the script of a spec for `steps` steps without and with a stop after `resume_at` steps, and compare. Raises
    what `run_gang` raises, and StateError for a script that makes fewer steps."""
    train = spec.train.model_copy(update={"determinism": "exact"})
    checkpoint = spec.checkpoint.model_copy(update={"digest_every": 1})
    spec = spec.model_copy(update={"train": train, "checkpoint": checkpoint})
    calm, stopped = (run_id(spec, "", salt) for salt in ("calm", "stopped"))
    for identity, stop_at in ((calm, steps), (stopped, resume_at), (stopped, steps)):
        launcher = choose_launcher(spec, log_dir(identity))
        with launcher.only_one(identity):
            assignment = ScriptAssignment.of(spec, identity).model_copy(update={"stop_at": stop_at})
            run_gang(spec, assignment, store, launcher)
        if (reached := newest_step(store, identity)) is None:
            raise StateError(nothing_saved(spec))
        if reached != stop_at:
            raise StateError(
                f"the script ended at step {reached}, before step {stop_at}: verify fewer steps, or give session.step "
                "each step"
            )
    return compare_runs(store, calm, stopped, steps, resume_at)


def compare_runs(store: Store, calm: str, stopped: str, steps: int, resume_at: int) -> Exactness:
    """The differences between two runs by their checkpoints of the last step and their rows."""
    one, other = open_checkpoint(store, calm, steps), open_checkpoint(store, stopped, steps)
    found = differences(one, other)
    tensors = [difference.name for difference in found.tensors] + [*found.only_one, *found.only_other, *found.unlike]
    trees = [name for name in one.tensors if name.partition("/")[0] == TREE and name in other.tensors]  # one per rank
    values = [path for name in trees for path in differing_paths(_plain(one, name), _plain(other, name))]
    named = [name for name in tensors if name not in trees]
    return Exactness(
        steps, resume_at, tuple(_rows(store, calm, stopped, resume_at)), tuple(values), tuple(sorted(set(named)))
    )


def _plain(checkpoint: Checkpoint, name: str) -> object:
    return from_bytes(checkpoint.tensor(name), name)["items"]


def _rows(store: Store, calm: str, stopped: str, resume_at: int) -> list[str]:
    """The metrics of the first row that differs, in words."""
    pairs = zip(read_history(store, calm), read_history(store, stopped), strict=False)
    for mine, theirs in pairs:
        if names := _differing(mine, theirs):
            when = "before the stop" if mine["step"] <= resume_at else "after the resume"
            return [f"{name} of step {mine['step']} ({when})" for name in names]
    return []


def _differing(mine: Row, theirs: Row) -> Sequence[str]:
    names = [name for name in {**mine, **theirs} if not name.startswith(_MEASURED) and name != "state_digest"]
    return [name for name in names if mine.get(name) != theirs.get(name)]
