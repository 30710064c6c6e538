"""Spot nodes in a plan, against closed forms."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.pipelines.cli import app
from holdfast.planning import Architecture, Candidate, Layout, Task, Updates, accelerator, estimate_run, spot
from holdfast.planning.run_estimate import RANK_SECONDS_PER_FAILURE, RESTART_SECONDS, stall_of
from holdfast.planning.spot import Mix, break_even, in_words, mix
from tests.planning.test_command import SMALL, SPEC

SHAPE = Architecture(32, 4096, 32, 32, 11008, 4096, 32000)
NODES, GPUS, PRICE = 8, 64, 3.0


def chosen(spot_price: float = 1.0, rate: float = 0.05, steps: int = 20_000) -> Candidate:
    here = accelerator("H100", price=PRICE, spot_price=spot_price, spot_interruptions=rate)
    layout = Layout(data=GPUS, shard=GPUS, sharding="full", micro_batch=1)
    return Candidate(Task(SHAPE, here, GPUS, steps, 1024, updates=Updates(compiled=True)), layout)


@pytest.mark.parametrize("notice", [True, False])
def test_without_spot_nodes_a_mix_is_the_outlook_of_the_plan(notice: bool) -> None:
    plain = chosen()
    for candidate in (plain, replace(plain, task=replace(plain.task, samples=10_000_000))):  # and a growing batch
        same_as_the_outlook(candidate, notice)


def same_as_the_outlook(each: Candidate, notice: bool) -> None:
    plain_mix, estimate = mix(each, 0, notice=notice), estimate_run(each)
    assert (plain_mix.seconds, plain_mix.cost, plain_mix.interval) == pytest.approx(
        (estimate.seconds, estimate.cost, estimate.interval), rel=1e-12
    )
    assert (plain_mix.nodes, plain_mix.spot, plain_mix.interruptions) == (NODES, 0, 0)


def test_a_reclaim_with_a_notice_costs_a_save_and_a_restart() -> None:
    none, on_spot = (mix(chosen(), count, notice=True) for count in (0, 3))
    stall, failures = stall_of(chosen()), GPUS / RANK_SECONDS_PER_FAILURE
    by_failures = failures * (RESTART_SECONDS + none.interval / 2)
    by_reclaims = 3 * 0.05 / 3600 * (RESTART_SECONDS + stall)
    assert on_spot.interval == none.interval == pytest.approx(math.sqrt(2 * stall / failures), rel=1e-12)
    assert none.seconds / on_spot.seconds == pytest.approx(1 - by_reclaims / (1 - by_failures), rel=1e-12)
    assert on_spot.interruptions == pytest.approx(3 * 0.05 * on_spot.seconds / 3600, rel=1e-12)
    assert on_spot.cost == pytest.approx(on_spot.seconds / 3600 * (3 * 8 * 1.0 + 5 * 8 * PRICE), rel=1e-12)


def test_a_reclaim_without_a_notice_is_a_failure_and_states_are_saved_more_often() -> None:
    spot_mix = mix(chosen(), NODES, notice=False)
    rate, stall = GPUS / RANK_SECONDS_PER_FAILURE + NODES * 0.05 / 3600, stall_of(chosen())
    assert spot_mix.interval == pytest.approx(math.sqrt(2 * stall / rate), rel=1e-12)
    uptime = 1 - rate * (RESTART_SECONDS + spot_mix.interval / 2)
    assert spot_mix.goodput == pytest.approx(uptime / (1 + stall / spot_mix.interval), rel=1e-12)
    assert spot_mix.seconds > mix(chosen(), NODES, notice=True).seconds


def accounted(one: Mix, stall: float, *, notice: bool) -> float:
    """Seconds of steps, saves, failures and reclaims, each counted over the whole run."""
    useful = chosen().speed.seconds * 20_000
    failures = one.seconds * GPUS / RANK_SECONDS_PER_FAILURE
    reclaim = stall if notice else one.interval / 2
    lost_seconds = failures * (RESTART_SECONDS + one.interval / 2) + one.interruptions * (RESTART_SECONDS + reclaim)
    return useful * (1 + stall / one.interval) + lost_seconds


@pytest.mark.parametrize("notice", [True, False])
def test_every_second_of_a_mix_is_accounted_for_and_reclaims_take_no_more_than_there_are(notice: bool) -> None:
    stall, useful = stall_of(chosen()), chosen().speed.seconds * 20_000
    for rate in (0.05, 0.5, 0.9, 1.2, 1.4):
        spot_mix = mix(chosen(rate=rate), NODES, notice=notice)
        assert spot_mix.seconds == pytest.approx(accounted(spot_mix, stall, notice=notice), rel=1e-9)
        assert spot_mix.interruptions * (RESTART_SECONDS + (stall if notice else 0)) < spot_mix.seconds - useful


@pytest.mark.parametrize("notice", [True, False])
def test_a_gang_that_does_nothing_but_restart_is_never_done_though_its_nodes_be_free(notice: bool) -> None:
    for price in (0.0, 1.0):
        futile = mix(chosen(price, rate=3.0), NODES, notice=notice)  # 24 restarts of five minutes an hour
        assert (futile.goodput, futile.seconds, futile.cost) == (0.0, math.inf, math.inf)
        advice = spot(chosen(price, rate=3.0), notice=notice)
        assert advice is not None and advice.best is not None and advice.best.seconds < math.inf
        assert advice.break_even < 3600 / RESTART_SECONDS / NODES
        assert "8          0      never     0.0%" in "\n".join(in_words(advice))


def test_the_cheapest_mix_is_all_or_none_where_time_does_not_matter() -> None:
    """Cost over the number of spot nodes is a rising line times a falling one: it has no interior minimum."""
    for price in (0.5, 1.0, 2.0, 2.9, 3.5):
        for rate in (0.0, 0.1, 1.0, 10.0):
            advice = spot(chosen(price, rate), notice=True)
            assert advice is not None and advice.best is not None
            costs = [mix(chosen(price, rate), count, notice=True).cost for count in range(NODES + 1)]
            assert advice.best.spot in (0, NODES)
            assert advice.best.cost == min(costs)


def test_spot_nodes_alone_cost_as_much_as_none_of_them_at_the_break_even() -> None:
    none, stall = mix(chosen(), 0, notice=True), stall_of(chosen())
    by_failures = GPUS / RANK_SECONDS_PER_FAILURE * (RESTART_SECONDS + none.interval / 2)
    pole = (1 - by_failures) / (NODES * (RESTART_SECONDS + stall)) * 3600
    closed = (1 - 1.0 / PRICE) * pole
    assert break_even(chosen(), notice=True) == pytest.approx(closed, rel=1e-9)
    sudden = break_even(chosen(), notice=False)
    assert sudden < closed
    assert mix(chosen(rate=sudden), NODES, notice=False).cost == pytest.approx(none.cost, rel=1e-9)
    assert break_even(chosen(spot_price=PRICE), notice=True) == 0.0
    assert break_even(chosen(spot_price=0.0), notice=True) == pytest.approx(pole, rel=1e-9)


def test_within_a_limit_of_time_as_many_nodes_are_on_spot_as_it_allows() -> None:
    every = [mix(chosen(rate=0.5), count, notice=True) for count in range(NODES + 1)]
    assert [nodes_mix.seconds for nodes_mix in every] == sorted(nodes_mix.seconds for nodes_mix in every)
    limit = (every[5].seconds + every[6].seconds) / 2
    limited, impossible = (spot(chosen(rate=0.5), notice=True, limit=seconds) for seconds in (limit, 1.0))
    assert limited is not None and limited.best == every[5]
    assert impossible is not None and impossible.best is None
    assert [choice.spot for choice in limited.shown] == [0, 2, 4, 6, 8]


def test_spot_advice_requires_price_and_interruption_rate() -> None:
    for missing in ("spot_price", "spot_interruptions"):
        candidate = chosen()
        here = candidate.task.accelerator.model_copy(update={missing: None})
        assert spot(Candidate(Task(SHAPE, here, GPUS, 100, 1024), candidate.layout), notice=True) is None


def test_a_plan_with_spot_prices_recommends_the_mix_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    prices = "prices: {accelerator_hour: 3, spot_accelerator_hour: 1, spot_interruptions: 0.05}"
    path.write_text(SPEC + f"  {prices}\n  spot: gcp\n  deadline_hours: 1000\n")

    def output_of(*more: str) -> str:
        run = CliRunner().invoke(app, ["plan", str(path), "--gpus", "16", *SMALL, *more], catch_exceptions=False)
        assert run.exit_code == 0, run.output
        return run.output

    text, advice = output_of(), json.loads(output_of("--json"))["spot"]
    assert "taken back with a notice" in text
    assert "Cheapest within cluster.deadline_hours (1000): 2 of 2 nodes on spot" in text
    assert (advice["best"]["spot"], advice["notice"], advice["limit"]) == (2, True, 3_600_000)
    assert [choice["spot"] for choice in advice["shown"]] == [0, 1, 2]
    frequent = json.loads(
        output_of("--json", "--set", "cluster.prices.spot_interruptions=20"), parse_constant=pytest.fail
    )
    assert [choice["seconds"] is None for choice in frequent["spot"]["shown"]] == [False, True, True]
    path.write_text(path.read_text().replace("deadline_hours: 1000", "deadline_hours: 0.000001"))
    assert "No mix is done within cluster.deadline_hours" in output_of()
    path.write_text(SPEC)
    assert "Spot" not in output_of() and json.loads(output_of("--json"))["spot"] is None
