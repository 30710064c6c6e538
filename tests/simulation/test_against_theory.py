"""The simulator against independent results: queueing formulas, an exhaustive optimum, and its own sums."""

import itertools
import json
import math

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.simulation import POLICIES, ClusterModel, Job, bounds, simulate, synthetic_jobs
from holdfast.simulation.cluster import NodeGroup
from holdfast.simulation.engine import Simulation, Task
from holdfast.simulation.policies.shares import HALF_LIFE


def cluster(nodes: int, gpus: int = 1, **fields: object) -> ClusterModel:
    group = {name: fields.pop(name) for name in list(fields) if name in NodeGroup.model_fields}
    return ClusterModel(groups=(NodeGroup(name="g", nodes=nodes, gpus=gpus, **group),), restart_minutes=0, **fields)


def jobs_of(*rows: tuple[float, int, float]) -> list[Job]:
    return [Job(str(index), submit, gpus, seconds) for index, (submit, gpus, seconds) in enumerate(rows)]


def erlang_c(servers: int, offered: float) -> float:
    """The probability of waiting in M/M/c (Erlang 1917)."""
    top = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return top / (sum(offered**k / math.factorial(k) for k in range(servers)) + top)


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(1, 0.8), (16, 0.9)])
def test_the_mean_wait_of_an_mmc_queue_is_erlangs(servers: int, load: float) -> None:
    """Batch means give the standard error of a correlated series. The formula lies within four standard errors."""
    random = np.random.Generator(np.random.PCG64(7))
    count, service = 60_000, 1.0
    arrivals = np.cumsum(random.exponential(service / (servers * load), count))
    lengths = random.exponential(service, count)
    jobs = [Job(str(i), float(arrivals[i]), 1, float(lengths[i])) for i in range(count)]
    waits = []
    for batch in range(20):  # each batch begins empty; its length makes the warm-up part of the error negligible
        part = jobs[batch * 3000 : (batch + 1) * 3000]
        outcome = simulate(cluster(servers), part, POLICIES["fifo"]())
        waits.append(outcome.wait_mean)
    expected = erlang_c(servers, servers * load) * service / (servers * (1 - load))
    error = np.std(waits, ddof=1) / math.sqrt(len(waits))
    assert abs(np.mean(waits) - expected) <= 4 * error + 0.02 * expected


def test_a_queue_of_equal_jobs_is_exact() -> None:
    outcome = simulate(cluster(1), jobs_of(*[(0.0, 1, 10.0)] * 5), POLICIES["fifo"]())
    assert (outcome.makespan, outcome.wait_mean, outcome.flow_mean) == (50.0, 20.0, 30.0)
    assert outcome.utilisation == outcome.goodput == 1.0


tiny = st.lists(
    st.tuples(st.integers(0, 20).map(float), st.integers(1, 3), st.integers(1, 30).map(float)), min_size=1, max_size=5
)


def best_without_preemption(jobs: list[Job], gpus: int) -> float:
    """The least mean time in the system over all orders in which a list scheduler may start the jobs. One of them is
    optimal, because no start needs to be later than the moment at which the gang fits.
    """
    best = math.inf
    for order in itertools.permutations(jobs):
        ends: list[tuple[float, int]] = []
        total, last = 0.0, 0.0
        for job in order:
            start = max(job.submit, last)
            for moment in sorted({start, *(end for end, _ in ends if end > start)}):
                if gpus - sum(gpus_of_job for end, gpus_of_job in ends if end > moment) >= job.gpus:
                    start = moment
                    break
            last = start
            ends.append((start + job.seconds, job.gpus))
            total += start + job.seconds - job.submit
        best = min(best, total / len(jobs))
    return best


@settings(max_examples=60)
@given(tiny)
def test_no_policy_beats_the_bounds_nor_the_exhaustive_optimum(rows: list[tuple[float, int, float]]) -> None:
    jobs = jobs_of(*rows)
    model = cluster(3)
    least = bounds(model, jobs)
    optimum = best_without_preemption(jobs, 3)
    assert optimum >= least.flow_mean - 1e-9
    for name, policy in POLICIES.items():
        outcome = simulate(model, jobs, policy())
        assert outcome.flow_mean >= least.flow_mean - 1e-9, name
        assert outcome.makespan >= least.makespan - 1e-9, name
        assert outcome.wait_mean >= least.wait_mean - 1e-9, name
        if not outcome.evictions:
            assert outcome.flow_mean >= optimum - 1e-9, name


def test_shortest_first_is_the_optimum_where_it_is_known_to_be() -> None:
    """On one accelerator, with all jobs present from the start, shortest first has the least mean time (Smith 1956)."""
    jobs = jobs_of(*[(0.0, 1, float(seconds)) for seconds in (700, 300, 900, 100, 500)])
    first_come = simulate(cluster(1), jobs, POLICIES["fifo"]()).flow_mean
    shortest = simulate(cluster(1), jobs[1:2] + jobs[:1] + jobs[2:], POLICIES["shortest"]())
    # The first job has started when the rest arrive. All are equal, and the queue sorts the rest.
    assert best_without_preemption(jobs, 1) <= shortest.flow_mean < first_come


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_finishes_every_job_and_its_sums_add_up(name: str) -> None:
    model = ClusterModel(
        groups=(
            NodeGroup(name="a", nodes=12, gpus=8, rack=4, mtbf_hours=400, repair_hours=2),
            NodeGroup(name="b", nodes=4, gpus=4, speed=0.5, rack=4, reclaim_hours=300),
        ),
        quotas={"tenant-0": 2.0},
        price_by_hour=(1.0, 2.0),
        spread_penalty=0.0,
    )
    jobs = synthetic_jobs(400, model.gpus, 1.1, seed=3)
    outcome = simulate(model, jobs, POLICIES[name](), seed=5)
    assert outcome == simulate(model, jobs, POLICIES[name](), seed=5)
    assert outcome.jobs == 400
    assert outcome.failures + outcome.reclaims > 0
    assert 0 < outcome.goodput <= outcome.utilisation <= 1 or name == "elastic"
    assert outcome.wait_p50 <= outcome.wait_p99
    assert outcome.makespan >= bounds(model, jobs).makespan


def test_the_cost_of_a_failure_is_the_checkpoint_age_and_the_restart() -> None:
    """One job of ten hours, checkpoints every hour, and one node that fails at known times."""
    model = ClusterModel(
        groups=(NodeGroup(name="g", nodes=1, gpus=8, mtbf_hours=4, repair_hours=1),),
        checkpoint_minutes=60, restart_minutes=6, grace_seconds=0,
    )  # fmt: skip
    outcome = simulate(model, jobs_of((0.0, 8, 36000.0)), POLICIES["fifo"](), seed=11)
    assert outcome.failures > 0
    assert outcome.overhead_hours == pytest.approx(outcome.failures * 0.1 * 8)
    # No failure lost more than an hour on each of eight accelerators.
    assert 0 < outcome.lost_hours <= outcome.failures * 1.0 * 8
    # The accelerators were held for the job's work, its losses and its restarts. The rest of the time it waited.
    gpu_seconds = 8 * 36000 + outcome.lost_hours * 3600 + outcome.overhead_hours * 3600
    assert outcome.flow_mean == pytest.approx(gpu_seconds / 8 + outcome.wait_mean)


def test_with_notice_enough_a_reclaimed_node_loses_no_work() -> None:
    model = ClusterModel(groups=(NodeGroup(name="g", nodes=1, reclaim_hours=2),), grace_seconds=60, save_seconds=30)
    outcome = simulate(model, jobs_of((0.0, 8, 36000.0)), POLICIES["fifo"](), seed=2)
    assert outcome.reclaims > 0
    assert outcome.lost_hours == 0


def test_inference_takes_its_nodes_at_its_hours_and_gives_them_back() -> None:
    """Half of two nodes by day: two one-node jobs of 24 hours alternate by day and run together by night."""
    model = cluster(2, gpus=8, inference_share=(0.0, 0.5))
    outcome = simulate(model, jobs_of((0.0, 8, 86400.0), (0.0, 8, 86400.0)), POLICIES["fifo"]())
    assert outcome.evictions >= 1
    assert outcome.makespan > 86400 * 1.25


def test_a_priority_job_takes_the_place_of_the_cheapest_victim() -> None:
    low = [Job("cheap", 0, 8, 50_000.0), Job("dear", 0, 8, 50_000.0)]
    high = Job("high", 7200.0, 8, 600.0, priority=2)
    outcome = simulate(cluster(2, gpus=8), [*low, high], POLICIES["priority"]())
    assert outcome.evictions == 1
    assert outcome.wait_mean <= 1200.0  # a round of the policy for the victim, and one for the job


def test_an_elastic_gang_grows_into_what_is_idle_and_gives_way() -> None:
    stretch = Job("stretch", 0.0, 8, 100_000.0, min_gpus=4, max_gpus=16)
    model = cluster(2, gpus=8)
    alone = simulate(model, [stretch], POLICIES["elastic"]())
    assert alone.resizes >= 1
    assert alone.makespan < 100_000.0
    late = Job("late", 40_000.0, 8, 1000.0)
    outcome = simulate(model, [stretch, late], POLICIES["elastic"]())
    assert outcome.wait_mean <= 600.0  # it waited for one round only


def test_a_gang_in_one_rack_is_faster_and_topology_waits_for_it() -> None:
    model = ClusterModel(groups=(NodeGroup(name="g", nodes=8, gpus=8, rack=4),), spread_penalty=0.5, restart_minutes=0)
    blockers = [Job(f"b{i}", 0.0, 8, 500.0) for i in range(2)]
    # Two nodes of one rack are busy, and four nodes of the other rack are free. The second gang must wait or spread.
    gangs = [Job("one", 1.0, 32, 10_000.0), Job("two", 2.0, 32, 10_000.0)]
    spread = simulate(model, blockers + gangs, POLICIES["backfill"]())
    waits = simulate(model, blockers + gangs, POLICIES["topology"]())
    assert waits.makespan <= spread.makespan
    assert waits.makespan == pytest.approx(10_500.0, abs=10)


def test_a_job_that_can_never_fit_is_named_as_such() -> None:
    with pytest.raises(ValueError, match="never fit"):
        simulate(cluster(1), jobs_of((0.0, 2, 1.0)), POLICIES["fifo"]())


def test_fair_shares_follow_the_quotas() -> None:
    """Two tenants with unlimited demand: the tenant with the double quota gets about double."""
    jobs = [Job(f"{tenant}{i}", 0.0, 1, 3600.0, tenant=tenant) for i in range(300) for tenant in ("a", "b")]
    model = ClusterModel(groups=(NodeGroup(name="g", nodes=1, gpus=6),), quotas={"a": 2.0})
    for name in ("fair-share", "drf"):
        outcome = simulate(model, jobs, POLICIES[name]())
        assert outcome.makespan == pytest.approx(100 * 3600)
        # `a` has four of the six until its 300 jobs are done after 75 hours. `b` has two, and then all six.
        assert outcome.tenant_waits["a"] == pytest.approx(37 * 3600, rel=0.03)
        assert outcome.tenant_waits["b"] == pytest.approx((37 * 150 + 87 * 150) / 300 * 3600, rel=0.03)


@pytest.mark.parametrize("name", ["fair-share", "drf"])
def test_equal_shares_start_tenants_by_name_and_jobs_by_submission(name: str) -> None:
    jobs = [
        Job(f"{tenant}{number}", 0.0, 1, 5000.0, tenant=tenant) for number in range(2) for tenant in ("b", "a", "c")
    ]
    simulation = Simulation(cluster(1), jobs, POLICIES[name](), 0)
    simulation.run()
    order = [task.job.id for task in sorted(simulation._tasks, key=lambda task: task.began)]
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_the_usage_of_a_tenant_halves_after_a_half_life() -> None:
    fair = POLICIES["fair-share"]()
    simulation = Simulation(cluster(4), [], fair, 0)
    task = Task(Job("x", 0.0, 2, 1000.0, tenant="a"))
    task.gpus = 2
    fair.started(task, simulation)
    assert fair.share("a", simulation) == 2000.0  # type: ignore[attr-defined]
    simulation.now = HALF_LIFE
    assert fair.share("a", simulation) == 1000.0  # type: ignore[attr-defined]
    fair.started(task, simulation)
    assert fair.share("a", simulation) == 3000.0  # type: ignore[attr-defined]
    task.done = 750.0
    fair.stopped(task, simulation)  # a quarter of it was left
    assert fair.share("a", simulation) == 2500.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("notice", "done"), [(59.0, 100.0), (60.0, 110.0), (61.0, 110.0), (None, 110.0)])
def test_an_evicted_job_keeps_what_it_could_save_in_the_notice_and_pays_its_restart_once(
    notice: float | None, done: float
) -> None:
    """A checkpoint every 100 s. A save takes 60 s, and a restart 120 s, which a first start does not need."""
    model = cluster(1, save_seconds=60.0, grace_seconds=60.0, checkpoint_minutes=100 / 60)
    model = model.model_copy(update={"restart_minutes": 2.0})
    simulation = Simulation(model, [Job("x", 0.0, 1, 1000.0)], POLICIES["fifo"](), 0)
    (task,) = simulation._tasks
    simulation._arrive(task)
    simulation.policy.schedule(simulation)
    assert (task.ready, task.starts) == (0.0, 1)
    simulation.now = 110.0
    simulation.evict(task, notice)
    assert task.done == pytest.approx(done)
    simulation.now = 200.0
    simulation.policy.schedule(simulation)
    assert (task.ready, task.since, task.starts) == (320.0, 200.0, 2)
    assert simulation.totals.overhead == 120.0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_schedule_of_every_policy_is_the_same_from_version_to_version(name: str) -> None:
    """When jobs start, end and restart, on a busy cluster with failures and ties. A change of such a number changes the
    figures for the comparison of policies. Change it only on purpose, and report it.
    """
    random = np.random.Generator(np.random.PCG64(3))
    jobs = [
        Job(
            str(number), number // 3 * 200.0, int(random.choice([1, 1, 2, 4, 6])), random.integers(5, 80) * 60.0,
            tenant="abc"[number % 3], priority=number % 5, value=float(number % 7), min_gpus=number % 4 == 0,
            same_rack=number % 9 == 0, estimate=random.integers(5, 99) * 60.0, slack=3600.0 * (number % 6 == 0),
        )
        for number in range(60)
    ]  # fmt: skip
    model = cluster(4, 4, rack=2, mtbf_hours=6.0, checkpoint_minutes=10, grace_seconds=30.0, save_seconds=20.0)
    model = model.model_copy(update={"restart_minutes": 3.0, "quotas": {"a": 2.0}, "price_by_hour": (1.0, 0.5)})
    simulation = Simulation(model, jobs, POLICIES[name](), 5)
    simulation.run()
    schedule = [(task.job.id, round(task.began, 3), round(task.finished, 3), task.starts) for task in simulation._tasks]
    assert blake3(json.dumps(schedule).encode()).hexdigest()[:12] == SCHEDULES[name]


SCHEDULES = {
    "backfill": "f44fb498b4c4",
    "cheap": "9972e80ca9bf",
    "conservative": "145bb93be55b",
    "drf": "2aa6ce599f28",
    "easy": "7f3ec56de6a1",
    "elastic": "dbe323f9eaa8",
    "fair-share": "8e13d4728e99",
    "feedback": "a0ecb45a6ea2",
    "fifo": "b7fef8d45fcb",
    "learned": "baa046f82932",
    "least-attained": "5a40fa43402c",
    "priority": "9b8a9fb41701",
    "shortest": "67245a47681b",
    "topology": "f44fb498b4c4",
    "value": "df4f484c1325",
}
