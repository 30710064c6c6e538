"""The whole DAG as a job of a real Ray, on two nodes; data prepared by many tasks; and jobs without room."""

import json
from pathlib import Path

import pytest

from holdfast.spec import ExitCode
from holdfast.store import layout
from tests.ray.cluster import RayCluster
from tests.ray.conftest import LONG, Calm
from tests.ray.place import Place
from tests.whole.submitting import ROOT, until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]
GATES = """import os, sys, time
for step in ("tokenise", "preprocess"):
    while step in sys.orig_argv and os.path.exists({gate!r} + step):
        time.sleep(0.05)
"""


def test_the_whole_dag_runs_as_a_job_and_the_same_submission_again_is_that_run(calm: Calm) -> None:
    place, run = calm.place, calm.made["run_id"]
    assert (calm.made["created"], calm.again["created"]) == (True, False)
    states = {step["name"]: step["state"] for step in calm.status["steps"]}
    assert states == dict.fromkeys(("preprocess", "train", "evaluate", "register", "notify"), "SUCCEEDED")
    second = place.submit()
    assert (second["created"], second["run"]["id"]) == (False, calm.made["run"]["id"])
    assert "trained, loss" in place.holdfast("logs", run, "--step", "train")
    assert "starting from step 0 of" in place.holdfast("logs", run, "--rank", "0")
    assert calm.made["run"]["id"] in place.holdfast("runs", "--backend", "ray")


def test_shares_of_a_corpus_are_tasks_and_a_lost_process_and_a_lost_node_cost_their_own_work_only(
    ray: RayCluster, home: Path, calm: Calm
) -> None:
    site = home.parent / "gates"  # each step waits there until a fault has hit it
    site.mkdir()
    (site / "sitecustomize.py").write_text(GATES.format(gate=f"{site}/closed-"))
    gates = {step: site / f"closed-{step}" for step in ("tokenise", "preprocess")}
    for gate in gates.values():
        gate.touch()
    variables = f"cluster.environment={{GLOO_SOCKET_IFNAME: lo, PYTHONPATH: '{site}:{ROOT}'}}"
    fan_out_place = Place(ray, home.parent / "many", home.parent / "other", "data.fan_out=3", variables, **LONG)
    submission = fan_out_place.submit()
    run, job = submission["run_id"], submission["run"]["id"]
    assert run == calm.made["run_id"], "the number of shares is in no identity"
    share = until(lambda: ray.processes("ray.step tokenise "), 300)[0]
    (lost_share,) = (argument.partition("=")[2] for argument in share.cmdline() if argument.startswith("--share="))
    share.kill()
    gates["tokenise"].unlink()
    join_process = until(lambda: ray.processes("ray.step preprocess "), 300)[0]
    message = "[tokenise] begins on"
    until(lambda: fan_out_place.logs(job).count(message) >= len(("0/3", "1/3", "2/3", lost_share)), 120)
    node = next(node for node in ray.nodes if join_process in node.processes)
    ray.nodes.remove(node)
    node.kill()
    gates["preprocess"].unlink()
    ray.add_node()
    until(lambda: any((fan_out_place.home / "store/datasets").glob("[0-9a-f]*/dataset.json")), 300)
    fan_out_place.holdfast("stop", job)
    assert fan_out_place.wait(job)["state"] == "CANCELED", fan_out_place.logs(job)
    started_steps = {step["name"] for step in fan_out_place.status(job)["steps"]}
    assert {"divide", "preprocess", *(f"tokenise-{share}-3" for share in range(3))} <= started_steps
    assert fan_out_place.dataset() == calm.place.dataset()
    log = fan_out_place.logs(job)
    assert f"tokenise {lost_share}: the process was killed" in log
    assert log.count(message) == len(("0/3", "1/3", "2/3", lost_share)), log
    assert json.loads(fan_out_place.store.get(layout.job(job, "preprocess")))["pid"] != join_process.pid


def test_a_gang_and_a_step_too_large_for_any_node_are_reported_and_time_out(home: Path, calm: Calm) -> None:
    place, patience = calm.place, "--set=cluster.pending_timeout_minutes=0.5"  # the other jobs have room by then
    gang = place.submit("--salt=gang", patience, "--set=cluster.resources={cpu: 64, memory: 1Gi, shared_memory: 64Mi}")
    step = place.submit("--salt=step", patience, "--set=cluster.steps.preprocess={cpu: 1, memory: 900Gi}")
    nodes = "none of Ray's 3 nodes is large enough; there are 2 with 2 CPU, 4 GiB memory; 1 with "
    for submission, request in (
        (gang, "wants 2 nodes with 64 CPU, 1 GiB memory each"),
        (step, "preprocess wants a node with 1 CPU, 900 GiB memory"),
    ):
        status = place.wait(submission["run_id"])
        assert status["state"] == "FAILED"
        message = f"{request}, and {nodes}"
        assert "given up after cluster.pending_timeout_minutes (0.5): " in status["message"], place.logs(
            submission["run_id"]
        )
        assert message in status["message"]
        lines = [line for line in place.logs(submission["run_id"]).splitlines() if "waiting: " in line]
        assert any(message in line for line in lines), "it is reported before it is given up"
        assert place.step(submission["run_id"], "notify")["state"] == "SUCCEEDED"
    assert place.endings(gang["run_id"]) == [ExitCode.UNSCHEDULABLE]


def test_the_doctor_accepts_a_fitting_ray_cluster_and_reports_misfits(calm: Calm, home: Path) -> None:
    place = calm.place
    fine = place.holdfast("doctor", str(place.spec), *place.sets, "--backend=ray")
    for finding in (
        f"OK    ray: answers at {place.ray.endpoint}, with 3 nodes",
        "OK    ray versions: every node has python ",
        "OK    ray room: nodes are large enough for the training job, preprocess, evaluate, register",
        f"OK    ray store: every node reads {(home / 'store').as_uri()}",
    ):
        assert finding in fine, fine
    place.environment["HOLDFAST_STORE"] = (other_store := (home.parent / "elsewhere").as_uri())
    large = "--set=cluster.resources={cpu: 64, memory: 1Gi, shared_memory: 64Mi}"
    try:
        output = place.holdfast("doctor", str(place.spec), *place.sets, large, "--backend=ray", code=206)
    finally:
        place.environment["HOLDFAST_STORE"] = (home / "store").as_uri()
    assert "FAIL  ray room: the training job wants 2 nodes with 64 CPU" in output
    assert f"has its store at {(home / 'store').as_uri()}, and this machine at {other_store}" in output
    assert not place.ray.processes("backends.ray.look")


def test_the_doctor_reports_an_unreachable_ray_cluster(calm: Calm) -> None:
    environment = {**calm.place.environment, "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"}
    place, calm.place.environment = calm.place.environment, environment
    try:
        output = calm.place.holdfast("doctor", "--backend=ray", code=207)
    finally:
        calm.place.environment = place
    assert "FAIL  ray: Ray at http://127.0.0.1:9: " in output
