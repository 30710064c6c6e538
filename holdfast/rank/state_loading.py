"""State loading: the first state of a run, its newest checkpoint, or that of an earlier step, into an engine."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.checkpoint import Checkpointer, Manifest, TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine, Scalars
from holdfast.engines.packed_base import PackedBase
from holdfast.engines.weights import (
    AdaptedState,
    AveragedState,
    FirstState,
    ImportedState,
    SeededState,
    TaughtState,
    require_left_out_taken,
)
from holdfast.model.hub import TEACHER_FIELD, require_weights_once
from holdfast.spec.identity import weights_of_digests
from holdfast.spec.plan import Plan, require_plan
from holdfast.store import Store
from holdfast.telemetry import phases


@dataclass
class StateLoader:
    """Loads states of a run into the engine of this rank."""

    spec: Assignment
    vocabulary: int
    engine: Engine
    plan: Plan
    replan: bool
    store: Store | None = None  # of the packed base
    on_rewind: Callable[[Scalars], None] = lambda _: None  # gets the scalars of the state after a rewind

    @cached_property
    def _first(self) -> FirstState:
        return first_state(self.spec, self.vocabulary, self.store)

    def fill_frozen(self) -> bool:
        """Fill the weights that are not trained. Returns whether there are any."""
        filled = False
        for box in self.engine.frozen():
            self._first.fill([box])
            filled = True
        return filled

    def restore(self, checkpointer: Checkpointer) -> int:
        """Load the newest checkpoint, or the first state. Returns the step of the state. A collective call. Raises what
        `Checkpointer.restore` raises, and PlanChangedError."""
        start = checkpointer.restore(self.engine.boxes(), self.fill_first, self._accept)
        self.engine.restored(start, checkpointer.scalars)
        return start

    def rewind(self, checkpointer: Checkpointer, step: int) -> Scalars:
        """Load the state after `step` steps, from a checkpoint or the first state. Returns its scalars. A collective
        call. Raises what `Checkpointer.load` raises."""
        phases.enter("restore")
        scalars: Scalars = {}
        if step:
            scalars = checkpointer.load(step, self.engine.boxes())
        else:
            checkpointer.wait_for_staging()
            self.fill_first(self.engine.boxes())
        self.engine.restored(step, scalars)
        self.on_rewind(scalars)
        phases.enter("check")
        return scalars

    def fill_first(self, boxes: Sequence[TensorBox]) -> None:
        """Fill boxes with the first state."""
        self._first.fill(boxes)

    def _accept(self, manifest: Manifest) -> None:
        # The loaded checkpoint may not be the newest one, whose plan was checked already.
        require_plan(manifest.segments, self.plan, self.spec.training.determinism, self.replan)
        require_left_out_taken(manifest.tensors, self.engine.boxes())


def first_state(spec: Assignment, vocabulary: int, store: Store | None = None) -> FirstState:
    """The state before the first step, according to the spec. The `store` keeps a packed base. Raises DataError if the
    weights differ from those in the run's identity."""
    seeded, own, teacher = (
        SeededState(spec.model, spec.training.seed),
        spec.model.init_from,
        spec.training.distillation.teacher,
    )
    state: FirstState = seeded
    digest, theirs, _ = weights_of_digests(spec.first_weights)
    if own is not None:
        require_weights_once(own, digest)
        state = AdaptedState(ImportedState(own, spec.model, vocabulary, _packed_base(spec, store, digest)), seeded)
    if spec.training.ema.decay is not None:
        state = AveragedState(state)
    if teacher is not None:
        require_weights_once(teacher, theirs, TEACHER_FIELD)
    return state if teacher is None else TaughtState(state, ImportedState(teacher, None, vocabulary))


def _packed_base(spec: Assignment, store: Store | None, digest: str) -> PackedBase | None:
    """The packed base of a run that stores one. The ranks of a stage hold the same matrices."""
    if store is None or not digest or spec.training.lora.rank is None or spec.training.lora.base != "nf4":
        return None
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // spec.parallel.pipeline
    return PackedBase(store, digest, int(os.environ.get("RANK", "0")) % ranks, ranks)
