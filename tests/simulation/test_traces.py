"""Traces: each published format gives the same jobs, and rows that are not jobs are reported."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.simulation import POLICIES, ClusterModel, load_cluster, simulate, synthetic_jobs
from holdfast.simulation.cluster import DAY, NodeGroup
from holdfast.simulation.traces import load_trace
from holdfast.spec.errors import DataError, MissingError, SpecError

PHILLY = [
    {
        "jobid": "application_1", "vc": "6214e9", "status": "Pass", "submitted_time": "2017-10-07 01:04:43",
        "attempts": [
            {"start_time": "2017-10-07 01:05:00", "end_time": "2017-10-07 01:06:40",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
        ],
    },
    {"jobid": "application_2", "vc": "x", "status": "Killed", "submitted_time": "2017-10-07 02:00:00", "attempts": []},
]  # fmt: skip
HELIOS = """job_id,user,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue,vc
1,u1,8,32,1,COMPLETED,2020-04-01 00:10:00,2020-04-01 00:10:30,2020-04-01 00:20:30,600,30,vcA
2,u1,0,4,1,COMPLETED,2020-04-01 00:11:00,2020-04-01 00:11:00,2020-04-01 00:12:00,60,0,vcA
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0,12000,16384,1,460,,LS,Running,0,12537496,0
openb-pod-1,6000,12288,4,1000,,BE,Succeeded,9437497,9437597,9437497
openb-pod-2,6000,12288,0,0,,BE,Succeeded,9437497,9437597,9437497
"""
PAI = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
a,worker,4,Terminated,86400,87400,600.0,29.29,50.0,T4
b,worker,1,Failed,,,600.0,29.29,100.0,T4
"""
OWN = "submit,gpus,seconds,tenant,priority,min_gpus,max_gpus,same_rack\n3600,16,7200,a,2,8,32,yes\n"


def written(folder: Path, text: str) -> Path:
    (folder / "trace").write_text(text, encoding="utf-8")
    return folder / "trace"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(PHILLY), [(3883.0, 3, 100.0, "6214e9")]),
        (HELIOS, [(600.0, 8, 600.0, "vcA")]),
        (PODS, [(0.0, 1, 12537496.0, "LS"), (9437497.0, 4, 100.0, "BE")]),
        (PAI, [(0.0, 2, 1000.0, "default")]),
        (OWN, [(3600.0, 16, 7200.0, "a")]),
    ],
    ids=["philly", "helios", "alibaba pods", "alibaba pai", "own"],
)
def test_each_published_format_is_recognised(
    tmp_path: Path, text: str, expected: list[tuple[float, int, float, str]]
) -> None:
    jobs = load_trace(written(tmp_path, text))
    assert [(job.submit, job.gpus, job.seconds, job.tenant) for job in jobs] == expected


def test_every_field_of_a_job_has_a_native_column(tmp_path: Path) -> None:
    (job,) = load_trace(written(tmp_path, OWN))
    assert (job.priority, job.min_gpus, job.max_gpus, job.same_rack) == (2, 8, 32, True)


def test_trace_lines_that_are_no_jobs_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_trace(written(tmp_path, HELIOS))
    assert "1 of 2 lines are left out" in caplog.text


def test_a_file_that_is_no_trace_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'b'.*no known trace"):
        load_trace(written(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(DataError, match="none of its 1 lines is a job"):
        load_trace(written(tmp_path, "submit,gpus,seconds\nsoon,1,1\n"))
    with pytest.raises(MissingError, match="synthetic:JOBS"):
        load_trace(tmp_path / "missing")


def test_synthetic_jobs_have_the_requested_load() -> None:
    jobs = synthetic_jobs(20_000, 1000, 0.8, seed=1)
    span = jobs[-1].submit - jobs[0].submit
    assert sum(job.work for job in jobs) / (1000 * span) == pytest.approx(0.8, rel=0.02)
    assert jobs == synthetic_jobs(20_000, 1000, 0.8, seed=1)
    assert sum(job.gpus == 1 for job in jobs) / len(jobs) == pytest.approx(0.54, abs=0.03)
    by_day = [job.submit % DAY < DAY / 2 for job in jobs]
    assert sum(by_day) / len(jobs) > 0.55  # the daily wave


def test_a_cluster_is_refused_with_every_problem(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        load_cluster(written(tmp_path, "groups: [{name: a, nodes: 0, gpu: 8}]\n"))
    assert {problem.field for problem in error.value.problems} == {"groups.0.nodes", "groups.0.gpu"}


def test_the_example_cluster_runs_under_the_policies_that_look_at_what_it_has() -> None:
    model = load_cluster(Path(__file__).parents[2] / "examples" / "clusters" / "mixed-1000.yaml")
    assert model.gpus == 1000
    jobs = synthetic_jobs(2000, model.gpus, 1.0, seed=4)
    for name in ("easy", "cheap"):
        outcome = simulate(model, jobs, POLICIES[name]())
        assert outcome.cost > 0
        assert outcome.kilograms_co2 > 0


def test_jobs_with_slack_wait_for_the_cheap_hours() -> None:
    """Half of the day costs ten times as much. A job that may wait half a day runs in the cheap half."""
    model = ClusterModel(groups=(NodeGroup(name="g", nodes=1, price=1.0),), price_by_hour=(10.0, 1.0))
    (job,) = synthetic_jobs(1, 8, seed=1)
    job = replace(job, submit=0.0, gpus=8, seconds=3600.0, slack=DAY / 2, estimate=0.0)
    assert simulate(model, [job], POLICIES["backfill"]()).cost == pytest.approx(80.0)
    assert simulate(model, [job], POLICIES["cheap"]()).cost == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"submit,gpus,seconds\n0,8,100\n0,8,inf\n", r"line 3: .* inf s"),
        (b"submit,gpus,seconds\n0,8,nan\n", "line 2"),
        (b"submit,gpus,seconds\nnan,8,5\n", "line 2"),
        (b"submit,gpus,seconds\n-inf,8,5\n", "line 2"),
        (b"submit,gpus,seconds\n0,8,100\n0,8,1e13\n", r"line 3: .* 10000000000000\.0 s"),
        (b"submit,gpus,seconds,slack\n0,8,5,1e12\n", "line 2"),
        (b"submit,gpus,seconds,estimate\n0,8,5,1e12\n", "line 2"),
        (b"submit,gpus,seconds\n0,8,10\n1e13,8,10\n", "more than 127 years"),
        (b"submit,gpus,seconds\n0,8,1e300\n", "line 2"),
        (b"submit,gpus,seconds,estimate\n0,8,5,inf\n", "line 2"),
        (b"submit,gpus,seconds\n0," + b"9" * 30 + b",5\n", "line 2"),
        (b"submit,gpus,seconds\n0,8,5\n\xff,1,1\n", "line 3: is not UTF-8"),
        (b"submit,gpus,seconds\n0,8," + b"5" * 200_000 + b"\n", "is no line of a table"),
        (b'[\n{"jobid": }]', "line 2: is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1, null, {}, []]", "none of its 4 lines"),
    ],
)
def test_a_trace_that_no_cluster_could_have_is_refused_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """Infinite seconds made a simulation endless."""
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_trace(tmp_path / "t.csv")
