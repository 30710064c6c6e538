"""Setup of one rank before its gang claims the run: device, gang, plan, engine, and rows of each batch."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from holdfast.collectives import Gang
from holdfast.dataset import Batches, Dataset, Rows
from holdfast.dataset.permutation import Indices
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine, build_engine
from holdfast.engines.mesh import Mesh
from holdfast.launch.device import device_name, join_gang, local_device
from holdfast.rank.measure.stragglers import Stragglers
from holdfast.rank.measure.throughput import Throughput
from holdfast.rank.plan import plan_of, require_one_plan
from holdfast.rank.preemption import PreemptionSignal
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.plan import Plan
from holdfast.telemetry import phases


def meet(spec: Assignment, leave: PreemptionSignal) -> tuple[torch.device, Gang]:
    """This rank's device and its gang. A collective call."""
    device = local_device(spec.accelerator)
    join_gang(device, spec.needs_group, spec.collective_timeout_minutes)
    leave.join()
    return device, Gang()


def agree_on_plan(spec: Assignment, device: torch.device, gang: Gang) -> Plan:
    """The plan that all ranks of the gang share. A collective call. Raises PlanChangedError if they have no common
    one."""
    plan = plan_of(spec, device)
    require_one_plan(gang.all_gather(plan, Plan), spec.training.determinism)
    return plan


def build(spec: Assignment, dataset: Dataset) -> Engine:
    """This rank's engine, which creates its own process groups. A collective call."""
    with phases.only("build"):
        return build_engine(spec, dataset.vocabulary, dataset.separator)


def throughput_of(spec: Assignment, dataset: Dataset, device: torch.device, gang: Gang) -> Throughput:
    """The throughput model of a step of the gang."""
    return Throughput.of(spec, dataset.vocabulary, gang.size, device_name(device))


def compare_stragglers(spec: Assignment, gang: Gang, rows: Rows) -> list[Stragglers]:
    """The straggler observer of this rank, which computes `rows` of each batch, or none for a single rank. It
    compares the ranks of one stage. A collective call."""
    if gang.size == 1:
        return []
    stage = Mesh.of(spec.parallel, gang.size).place(gang.rank)
    return [Stragglers(gang, stage, computed_rows(spec, gang.size, rows))]


def batches(spec: Assignment, dataset: Dataset, gang: Gang) -> tuple[Batches, Rows]:
    """The global batches, and this rank's rows of each."""
    training = dataset.training(
        spec.model.context, BatchSizes.of(spec.training), spec.training.seed, spec.source_weights, spec.shuffle
    )
    return training, rows_of_rank(spec, gang)


def rows_of_rank(spec: Assignment, gang: Gang) -> Callable[[int], slice | Indices]:
    """This rank's rows of a global batch, as a function of its size."""
    if spec.grid(gang.size):
        return partial(rows_in_grid, spec, gang)
    mesh = Mesh.of(spec.parallel, gang.size)
    place = mesh.data_rank(gang.rank)
    return lambda size: slice(place * size // mesh.data, (place + 1) * size // mesh.data)


def rows_in_grid(spec: Assignment, gang: Gang, size: int) -> Indices:
    """This rank's rows of a batch of `size` samples under elastic determinism."""
    grid = spec.grid(gang.size, size)
    assert grid is not None
    return grid.rows(gang.rank, spec.training.micro_batch, round_robin=spec.parallel.strategy == "fsdp")


def computed_rows(spec: Assignment, ranks: int, rows: Rows) -> int:
    """The number of rows that the rank computes in a full-size step. With grains in rounds, a rank without a grain
    in the last round computes one that is not added."""
    if (grid := spec.grid(ranks)) and spec.parallel.strategy == "fsdp":
        return grid.rounds * spec.training.micro_batch
    size = spec.training.global_batch
    return len(np.arange(size)[rows(size) if callable(rows) else rows])
