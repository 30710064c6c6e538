"""The log of a step's pod, as the recorded server returns it. An error is not a log, and a live pod is found by its
name."""

from pathlib import Path

import pytest
from kubernetes.client import Configuration

from holdfast.launch.kubernetes.client import PODS, Api
from holdfast.pipelines.backends.kubeflow.backend import Kubeflow
from holdfast.pipelines.backends.kubeflow.connection import Access, Server
from holdfast.pipelines.backends.kubeflow.pod_logs import RUN_LABEL, PodLogs
from holdfast.pipelines.backends.kubeflow.submit import submit
from holdfast.pipelines.backends.kubeflow.watch import logs
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import MissingError
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store
from tests.cluster.api import ApiServer
from tests.cluster.container import Printed
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import spec


def trains(kubeflow: KubeflowServer, server: Server) -> str:
    """KFP's id of a run that still trains and has printed a line."""
    run = submit(server, RunRequest(spec(), run_id="3f2a4b5c6d7e8f90")).kfp_run_id
    kubeflow.progress(run, "RUNNING", {"train": "RUNNING"})
    kubeflow.logs = {(run, "train"): b"step 1\n"}
    return run


def test_an_answer_that_is_an_error_is_one_and_no_log(kubeflow: KubeflowServer, server: Server) -> None:
    run = trains(kubeflow, server)  # one user: KFP never finds a live pod
    for follow in (False, True):
        with pytest.raises(MissingError, match=r"the answer was: .*Failed to read logs for run") as error:
            for line in logs(server, run, "train", follow=follow, pause=lambda _: kubeflow.progress(run, "FAILED", {})):
                pytest.fail(f"{line} is no line of a log")
        assert error.value.exit_code == 15


def test_a_live_pod_is_read_by_the_name_in_the_record_of_its_step(tmp_path: Path) -> None:
    with KubeflowServer(multi_user=True) as kubeflow:
        access = Access(endpoint=kubeflow.endpoint, namespace="team")
        run = trains(kubeflow, Server(access))
        store = open_store(f"file://{tmp_path}/store")
        backend = Kubeflow(access, store.url)
        with pytest.raises(MissingError):
            list(backend.logs(run, "train"))
        outcome = Outcome("train", 1, 1.0, pod=kubeflow.workflow(run).pod("train"))
        store.put(layout.job(run, "train"), outcome.as_json())
        assert list(backend.logs(run, "train")) == [("train", "step 1")]


def test_a_live_pod_is_read_from_kubernetes_where_kfp_does_not_find_it(
    kubeflow: KubeflowServer, server: Server
) -> None:
    run = trains(kubeflow, server)
    workflow = kubeflow.workflow(run)
    with ApiServer() as cluster:
        cluster.elsewhere["kubeflow"] = cluster.allowed = {"pods": {"create", "list"}, "pods/log": {"get"}}
        configuration = Configuration(host=cluster.url)
        configuration.api_key["authorization"] = "Bearer token-1"
        api = Api(lambda: configuration, "kubeflow", 5.0)
        for step, label in (("train", run), ("train", "another-run")):
            name = workflow.pod(step) if label == run else workflow.pod(step).replace(workflow.name, "other")
            pod = {"metadata": {"name": name, "labels": {RUN_LABEL: label}}, "spec": {"containers": [{"name": "main"}]}}
            api.create(PODS, {"apiVersion": "v1", "kind": "Pod", **pod})
        printed = Printed()
        printed.add("step 1 of the pod itself")
        cluster.logs = {workflow.pod("train"): printed}.get
        assert PodLogs(server, run, api=api).read(workflow.executor("train")) == b"step 1 of the pod itself\n"


def test_the_pod_of_a_step_that_begins_while_the_log_is_followed_is_found(
    kubeflow: KubeflowServer, server: Server
) -> None:
    run = submit(server, RunRequest(spec(), run_id="3f2a4b5c6d7e8f90")).kfp_run_id
    kubeflow.progress(run, "RUNNING", {"preprocess": "RUNNING"})
    workflow = kubeflow.workflow(run)
    printed: dict[str, Printed] = {}
    with ApiServer() as cluster:
        cluster.elsewhere["kubeflow"] = cluster.allowed = {"pods": {"create", "list"}, "pods/log": {"get"}}
        cluster.logs = printed.get
        configuration = Configuration(host=cluster.url)
        configuration.api_key["authorization"] = "Bearer token-1"
        api = Api(lambda: configuration, "kubeflow", 5.0)
        source = PodLogs(server, run, api=api)
        for step in ("preprocess", "train"):
            kubeflow.progress(run, "RUNNING", {"preprocess": "RUNNING", "train": "RUNNING"})
            pod = {"metadata": {"name": workflow.pod(step), "labels": {RUN_LABEL: run}}}
            api.create(PODS, {"apiVersion": "v1", "kind": "Pod", **pod, "spec": {"containers": [{"name": "main"}]}})
            printed[workflow.pod(step)] = Printed()
            printed[workflow.pod(step)].add(step)
            assert source.read(workflow.executor(step)) == f"{step}\n".encode()


def test_following_reads_pods_whose_names_become_known_later() -> None:
    with KubeflowServer(multi_user=True) as kubeflow:
        server = Server(Access(endpoint=kubeflow.endpoint, namespace="team"))
        run = trains(kubeflow, server)
        pod_names: list[str] = []

        def pause(_: float) -> None:
            assert not pod_names, "the pod's name was known, and its log was not read"
            pod_names.append(kubeflow.workflow(run).pod("train"))

        followed = logs(server, run, "train", follow=True, pause=pause, pods=lambda _: pod_names)
        assert next(followed) == ("train", "step 1")
