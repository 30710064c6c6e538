"""One step of the torch engine: the state after a step that is held back, and the reported loss of any layout."""

from datetime import timedelta
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from holdfast.engines.grid import Grid
from holdfast.engines.interface import Engine
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch import accumulation
from holdfast.engines.torch.accumulation import PipelineStages
from holdfast.engines.torch.elastic import TreeReduceScatter
from holdfast.engines.torch.micro import Micro, MicroSettings
from holdfast.engines.torch.parallelize import Topology
from holdfast.launch.device import MEETING_VARIABLE
from holdfast.objectives.next_token import NextToken
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.setup import meet
from tests.model.test_packed_attention import Recorder
from tests.train.ranks import started
from tests.train.test_anomalies import LAMB
from tests.train.test_elastic import ALL_GRIDS, by_definition, values
from tests.train.test_experts import BIASED, MIXTURE
from tests.train.test_reference import END, global_batch
from tests.train.tiny_run import VOCABULARY, tiny_assignment

RATE = 0.02
LONG = ("model.context=128", "training.global_batch=2", "training.micro_batch=2")
HALF = ("training.precision=fp16", "training.loss_scale.initial_power=8", "training.loss_scale.growth_interval=1000")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank of a gang."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_no_tensor_of_a_step_has_all_tokens_and_the_vocabulary() -> None:
    """With one chunk for a whole row, the recorder sees such a tensor."""
    rows = torch.arange(2 * 129).view(2, -1) % VOCABULARY
    largest = {}
    for chunk in (16, 128):
        engine = started(tiny_assignment(*LONG, f"training.loss_chunk={chunk}"), END)
        with Recorder() as record:
            engine.step(rows, RATE)
        logits = {shape[0] for shape in record.shapes if len(shape) == 2 and shape[1] == VOCABULARY} - {32}
        largest[chunk] = max(logits)
        assert not [shape for shape in record.shapes if len(shape) > 2 and shape[-1] == VOCABULARY]
    assert largest == {16: 16, 128: 128}


def bits(engine: Engine) -> dict[str, torch.Tensor]:
    return {box.name: box.data.detach().clone() for box in engine.boxes()}


@pytest.mark.parametrize("overrides", [BIASED, MIXTURE, (LAMB,), HALF], ids=["biases", "mixture", "lamb", "fp16"])
@pytest.mark.usefixtures("alone")
def test_a_step_that_is_held_back_changes_no_bit_of_the_state_and_none_of_what_follows(
    overrides: tuple[str, ...],
) -> None:
    def train(steps: tuple[tuple[int, bool], ...]) -> tuple[Engine, list[dict[str, torch.Tensor]]]:
        engine = started(tiny_assignment(*overrides), END)
        states = []
        for step, is_held in steps:
            torch.manual_seed(step)
            engine.step(global_batch(step), RATE, judge=lambda *_, held=is_held: torch.tensor(float(held)))
            states.append(bits(engine))
        return engine, states

    engine, (first, after, last) = train(((0, False), (1, True), (2, False)))
    assert all(torch.equal(first[name], after[name]) for name in first), [
        name for name in first if not torch.equal(first[name], after[name])
    ]
    other, states = train(((0, False), (2, False)))
    assert all(torch.equal(last[name], states[-1][name]) for name in last)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert engine.scalars(3)["optimizer.step"] == other.scalars(2)["optimizer.step"] == 2


@pytest.mark.usefixtures("alone")
def test_collectives_of_all_groups_use_the_timeout_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEETING_VARIABLE, str(tmp_path / "meeting"))
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))  # restored afterwards
    spec = tiny_assignment("training.determinism=elastic", "cluster.collective_timeout_minutes=42")
    try:
        meet(spec, PreemptionSignal())
        groups: tuple[Any, ...] = (dist.group.WORLD, init_device_mesh("cpu", (1,)).get_group(), dist.new_group([0]))
        waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    finally:
        dist.destroy_process_group()
    assert waits == [timedelta(minutes=42)] * 3


MESHES = [
    Mesh(replicas=replicas, shards=shards, tensor=tensor, pipeline=pipeline, context=context)
    for pipeline in (2, 3)
    for tensor in (1, 2)
    for context, replicas, shards in ((1, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 1), (2, 2, 3), (4, 1, 4))
]


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_loss_of_a_pipeline_is_the_mean_over_the_counted_tokens_at_any_layout(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages, shards, replicas, sequence parts and matrix parts do not scale the reported loss."""
    for mesh in MESHES:
        count = torch.tensor([40.0])
        # By the groups that average gradients: each has separate rows, or a part of each row.
        sums = [float(3 + group) for group in range(mesh.averaged)]
        totals: list[float] = []
        shares: set[float] = set()

        def mean(rank: int, everywhere: float | None) -> float:
            """The loss that a rank reports if the contributions of all ranks sum to `everywhere`."""
            loss_scale: Any = None if scale is None else SimpleNamespace(scale=scale)
            rows_only: Any = None
            settings = MicroSettings(4, None, None, None)
            topology = Topology(mesh, torch.device("cpu"))  # noqa: B023
            micro = Micro(rows_only, NextToken(), None, loss_scale, topology, settings)

            def forward_backward(_seen: Any, _terms: Any, share: torch.Tensor, _weights: Any) -> torch.Tensor:
                shares.add(float(share))  # noqa: B023
                group = rank // mesh.tensor % mesh.averaged  # noqa: B023
                return share * (sums[group] if mesh.speaks(rank) else 1e9)  # noqa: B023

            def all_reduce(total: torch.Tensor) -> None:
                totals.append(float(total))  # noqa: B023
                if everywhere is not None:
                    total.fill_(everywhere)

            monkeypatch.setattr(accumulation.dist, "all_reduce", all_reduce)
            trained = SimpleNamespace(forward_backward=forward_backward)
            pipelines: Any = SimpleNamespace(trained=trained, reference=None, teacher=None)
            stages = PipelineStages(micro, pipelines, None, rows_only, mesh.speaks(rank), 1)  # noqa: B023
            return float(stages.run(torch.zeros(4, 2, dtype=torch.long), count))  # noqa: B023

        for rank in range(mesh.size):
            mean(rank, None)
        everywhere = sum(totals)
        assert [mean(rank, everywhere) for rank in range(mesh.size)] == pytest.approx([sum(sums) / 40] * mesh.size)
        # Averaged again, this is the gradient of the mean.
        assert [*shares] == pytest.approx([mesh.averaged / 40 * (scale or 1)])


def test_a_shard_of_gradients_is_the_sum_of_the_grains_alone_where_the_last_round_has_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some ranks compute a spare grain in the last round. Their data of it is never added."""
    received: list[torch.Tensor] = []
    monkeypatch.setattr(
        "holdfast.engines.torch.elastic.dist.all_to_all_single",
        lambda output, _, group: output.copy_(received.pop(0)),
    )
    group: Any = None
    for grid in ALL_GRIDS:
        leaves = [*values(grid.grains), *[torch.full((64,), 1e30)] * (grid.ranks * grid.rounds - grid.grains)]
        reduce, output = TreeReduceScatter(repeat(grid).__next__), torch.zeros(64)
        for _ in range(2):  # the second step begins like the first one
            for number in range(grid.rounds):
                received.append(torch.cat(leaves[number * grid.ranks : (number + 1) * grid.ranks]))
                reduce(output, torch.zeros(64 * grid.ranks), group, None)
            assert torch.equal(output, by_definition(values(grid.grains))), grid
    assert any(grid.rounds * grid.ranks > grid.grains for grid in ALL_GRIDS)
    assert Grid(3, 2).rounds == 2
