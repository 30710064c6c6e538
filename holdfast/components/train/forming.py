"""What a rank has before its gang claims the run: its dataset, its device, the others, the plan, and the engine.

A launch that stands by (`launch.turn`) has all of it ahead of its turn where ranks compute on CPUs, and what needs no
accelerator where they compute on one. It is what a rank makes that starts when it is needed, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import numpy as np
import torch

from holdfast.components.train.assignment import Assignment
from holdfast.components.train.engine import Engine, build_engine
from holdfast.components.train.leave import LeaveSignal
from holdfast.components.train.mesh import Mesh
from holdfast.components.train.plan import plan_of, require_one_plan
from holdfast.components.train.randomness import make_deterministic
from holdfast.components.train.stragglers import Stragglers
from holdfast.components.train.throughput import Throughput
from holdfast.dataset import Batches, Dataset, Rows
from holdfast.dataset.permutation import Indices
from holdfast.launch import turn
from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.device import device_name, join_gang, local_device
from holdfast.launch.launches import newest_launch, read_launch
from holdfast.runtime.environment import cache_dir
from holdfast.runtime.gang import Gang
from holdfast.spec.errors import LostPeerError
from holdfast.spec.plan import Plan
from holdfast.spec.sizes import BatchSizes
from holdfast.store import Store
from holdfast.telemetry import phases


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
            _ = formed.plan, formed.batches, formed.throughput, formed.stragglers
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
            join_gang(device, self.spec.needs_group, self.spec.collective_timeout_minutes)
            leave.join()
            self._met = device, Gang()
        return self._met

    def build(self) -> Engine:
        """Its engine, which makes groups of its own. A collective call."""
        if self._engine is None:
            with phases.only("build"):
                self._engine = build_engine(self.spec, self.dataset.vocabulary, self.dataset.separator)
        return self._engine

    @cached_property
    def plan(self) -> Plan:
        """The plan that all ranks of the gang, which has met, compute by. A collective call. Raises PlanChangedError if
        there is none."""
        device, gang = self._here
        plan = plan_of(self.spec, device)
        require_one_plan(gang.all_gather(plan, Plan), self.spec.training.determinism)
        return plan

    @cached_property
    def batches(self) -> tuple[Batches, Rows]:
        """See `batches`, for the gang that has met."""
        return batches(self.spec, self.dataset, self._here[1])

    @cached_property
    def throughput(self) -> Throughput | None:
        """What a step of the gang that has met is; for rank 0, which tells."""
        device, gang = self._here
        if gang.rank > 0:
            return None
        return Throughput.of(self.spec, self.dataset.vocabulary, gang.size, device_name(device))

    @cached_property
    def stragglers(self) -> list[Stragglers]:
        """What compares this rank, and its share of each batch, with its like, if there are any. A collective call of
        the gang that has met."""
        _, gang = self._here
        if gang.size == 1:
            return []
        stage = Mesh.of(self.spec.parallel, gang.size).place(gang.rank)
        return [Stragglers(gang, stage, computed_rows(self.spec, gang.size, self.batches[1]))]

    @property
    def _here(self) -> tuple[torch.device, Gang]:
        assert self._met is not None, "it has met"
        return self._met


def batches(spec: Assignment, dataset: Dataset, gang: Gang) -> tuple[Batches, Rows]:
    """The global batches, and which rows of each are this rank's."""
    training = dataset.training(
        spec.model.context, BatchSizes.of(spec.training), spec.training.seed, spec.source_weights, spec.shuffle
    )
    if spec.grid(gang.size):
        return training, partial(rows_in_grid, spec, gang)
    mesh = Mesh.of(spec.parallel, gang.size)
    place = mesh.data_rank(gang.rank)
    return training, lambda size: slice(place * size // mesh.data, (place + 1) * size // mesh.data)


def rows_in_grid(spec: Assignment, gang: Gang, size: int) -> Indices:
    """This rank's rows of a batch of some size under elastic determinism."""
    grid = spec.grid(gang.size, size)
    assert grid is not None
    return grid.rows(gang.rank, spec.training.micro_batch, in_turn=spec.parallel.strategy == "fsdp")


def computed_rows(spec: Assignment, ranks: int, rows: Rows) -> int:
    """How many rows the rank computes in a step that is fed `rows` of a batch that has grown: where grains are dealt in
    turn, one without a grain in the last round computes one that nobody adds."""
    if (grid := spec.grid(ranks)) and spec.parallel.strategy == "fsdp":
        return grid.rounds * spec.training.micro_batch
    whole = spec.training.global_batch
    return len(np.arange(whole)[rows(whole) if callable(rows) else rows])
