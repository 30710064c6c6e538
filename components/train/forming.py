"""What a rank has before its gang claims the run: its dataset, its device, the others, and the engine.

A launch that stands by (`launch.turn`) has all of it ahead of its turn where ranks compute on CPUs, and what needs no
accelerator where they compute on one. It is what a rank makes that starts when it is needed, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from holdfast.components.dataset import Dataset
from holdfast.components.launch import turn
from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.launch.device import join_gang, local_device
from holdfast.components.launch.launches import newest_launch, read_launch
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import LostPeerError
from holdfast.components.store import Store
from holdfast.components.telemetry import phases
from holdfast.components.train.assignment import Assignment
from holdfast.components.train.engine import Engine, build_engine
from holdfast.components.train.leave import LeaveSignal
from holdfast.components.train.randomness import make_deterministic


@dataclass
class Formed:
    """One rank. What is there already is not made again."""

    spec: Assignment
    dataset: Dataset
    _met: tuple[torch.device, Gang] | None = None
    _engine: Engine | None = None

    @classmethod
    def of(cls, store: Store, spec: Assignment) -> Self:
        """A rank with all that it needs neither an accelerator nor another one for."""
        make_deterministic(spec.training.determinism, spec.parallel.threads)
        return cls(spec, Dataset.open(store, spec.dataset_id, cache_dir()))

    @classmethod
    def standing_by(cls, store: Store, run_id: str, leave: LeaveSignal) -> Self:
        """A rank whose turn has come. Nobody had recorded its launch while it waited: what it is ready for is what the
        newest one was told. While it waits it has none of an accelerator, neither memory nor a context."""
        told = read_launch(store, run_id, newest_launch(store, run_id))
        formed = cls.of(store, Assignment.model_validate(told["assignment"]))
        if ACCELERATORS[formed.spec.accelerator].device == "cpu":
            formed.meet(leave)
            if formed.spec.parallel.offload_path is None:  # else a second set of its files would fill the disk
                formed.build()
        turn.await_turn()
        phases.begin()
        return formed

    def for_assignment(self, spec: Assignment) -> Self:
        """Itself, for what its launch was told in the end: of that only the examination may be another one."""
        health = {"health_seconds": spec.health_seconds, "health_reason": spec.health_reason}
        if self.spec.model_copy(update=health) != spec:
            raise LostPeerError("this launch was told something else than the one that it was made ready by")
        return self

    def meet(self, leave: LeaveSignal) -> tuple[torch.device, Gang]:
        """Its device and its gang. A collective call."""
        if self._met is None:
            device = local_device(self.spec.accelerator)
            join_gang(device, always=self.spec.needs_group)
            leave.join()
            self._met = device, Gang()
        return self._met

    def build(self) -> Engine:
        """Its engine, which makes groups of its own. A collective call."""
        if self._engine is None:
            with phases.only("build"):
                self._engine = build_engine(self.spec, self.dataset.vocabulary, self.dataset.separator)
        return self._engine
