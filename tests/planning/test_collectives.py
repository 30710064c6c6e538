"""Collectives: the textbook's formulas, and properties that hold for all figures."""

import math

import pytest

from holdfast.planning import Layout, accelerator
from holdfast.planning.collectives import (
    all_gather,
    all_reduce,
    all_reduce_by,
    all_to_all,
    group,
    point_to_point,
    reduce_scatter,
)
from holdfast.planning.schedule import bubble, in_flight, timeline

H100 = accelerator("H100")
MB = 1e6


def test_a_ring_all_reduce_in_a_node_matches_the_formula() -> None:
    alpha, beta = H100.link_latency, H100.link * H100.link_reach
    assert all_reduce_by(100 * MB, group(H100, 8))["ring"] == pytest.approx(14 * alpha + 2 * 7 / 8 * 100 * MB / beta)


def test_nothing_takes_time_in_a_group_of_one() -> None:
    alone = group(H100, 1)
    assert all_reduce(MB, alone) == reduce_scatter(MB, alone) == all_to_all(MB, alone) == 0


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_an_all_reduce_is_no_slower_than_a_scatter_and_a_gather_and_no_faster_than_one(ranks: int, size: float) -> None:
    ranks_group = group(H100, ranks)
    assert reduce_scatter(size, ranks_group) <= all_reduce(size, ranks_group) * (1 + 1e-9)
    assert all_reduce(size, ranks_group) <= reduce_scatter(size, ranks_group) + all_gather(size, ranks_group) + 1e-12


def test_small_messages_use_few_steps_and_large_ones_all_links() -> None:
    small, large = all_reduce_by(1e3, group(H100, 1024)), all_reduce_by(1e9, group(H100, 8))
    assert large["ring"] < large["tree"]
    assert small["ring"] > 10 * min(small.values())


def test_collectives_across_nodes_are_slower() -> None:
    inside, across_nodes = group(H100, 8), group(H100, 8, stride=8)
    assert (inside.nodes, across_nodes.nodes) == (1, 8)
    for time_of in (all_reduce, all_to_all, point_to_point):
        assert time_of(100 * MB, across_nodes) > 2 * time_of(100 * MB, inside)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 16)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_idle_time_of_a_drawn_schedule_matches_the_formula(schedule: str, stages: int, micro_batches: int) -> None:
    layout = Layout(pipeline=stages, schedule=schedule)  # type: ignore[arg-type]
    rows = [line.split("|")[1] for line in timeline(layout, micro_batches, width=10_000).splitlines()[:-1]]
    computing = 3 * micro_batches
    assert all(len(row) - row.count(".") == computing for row in rows)
    assert len(rows[0]) == computing + math.ceil(bubble(layout, micro_batches) * computing - 1e-9)


def test_the_micro_batches_in_flight_per_stage_are_known() -> None:
    assert in_flight(Layout(pipeline=4, schedule="gpipe"), 16) == 16
    assert [in_flight(Layout(pipeline=4), 16, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pipeline=4, schedule="interleaved", chunks=3), 16) == 4 + 3 / 3
