"""Findings about scheduling: APIs, operators, queues and places for ranks, each of them missing once."""

import json
import re

import pytest

from holdfast.pipelines import doctor
from holdfast.pipelines.backends.slurm.client import Partition
from holdfast.pipelines.doctor.slurm import _partition
from holdfast.spec import parse_spec
from tests.pipelines.doctor.cluster import (
    ACCOUNT,
    ACTIONS,
    DEPLOYMENTS,
    LOCAL_QUEUE,
    NODES,
    PRIORITY,
    QUEUE,
    Cluster,
    examined,
    only,
    spec_with,
)


def test_a_healthy_cluster_has_no_failed_check(cluster: Cluster) -> None:
    findings = list(doctor.examine(everything=True))
    assert [finding for finding in findings if finding.outcome == "fail"] == []
    assert examined() == {}
    assert {finding.check for finding in findings} >= {
        "api server", "pytorchjobs.kubeflow.org", "workflows.argoproj.io", "localqueues.kueue.x-k8s.io",
        "gang scheduling", "volcano actions", "volcano queue", "kueue queue", "permissions", "service accounts",
        "priority class", "store", "mlflow",
    }  # fmt: skip
    assert all(request.startswith("GET") or request.endswith("/subjectaccessreviews") for request in cluster.requests)
    assert cluster.users == {"system:serviceaccount:team:holdfast-launcher"}


@pytest.mark.parametrize(
    ("missing", "resource", "outcome"),
    [
        ("/apis/kubeflow.org/v1", "pytorchjobs.kubeflow.org", "fail"),
        ("/apis/argoproj.io/v1alpha1", "workflows.argoproj.io", "fail"),
        ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs.trainer.kubeflow.org", "warn"),
        ("/apis/batch.volcano.sh/v1alpha1", "jobs.batch.volcano.sh", "warn"),
        ("/apis/scheduling.volcano.sh/v1beta1", "queues.scheduling.volcano.sh", "warn"),
        ("/apis/kueue.x-k8s.io/v1beta2", "localqueues.kueue.x-k8s.io", "warn"),
    ],
)
def test_an_unserved_api_is_reported(cluster: Cluster, missing: str, resource: str, outcome: str) -> None:
    del cluster.objects[missing]
    finding = only(examined(), resource)
    assert finding.outcome == outcome


def test_an_old_version_is_reported_with_the_installed_ones(cluster: Cluster) -> None:
    del cluster.objects["/apis/kueue.x-k8s.io/v1beta2"]
    cluster.objects["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1alpha2"}]}
    assert "only v1alpha2" in only(examined(), "localqueues.kueue.x-k8s.io").message


def test_a_version_without_the_resource_is_not_reported_missing(cluster: Cluster) -> None:
    """This happens where one of an operator's definitions was deleted or never installed."""
    cluster.objects["/apis/kueue.x-k8s.io/v1beta2"] = {"resources": [{"name": "clusterqueues"}]}
    message = only(examined(), "localqueues.kueue.x-k8s.io").message
    assert message == "Kueue: kueue.x-k8s.io/v1beta2 has no localqueues"


def test_a_resource_that_the_spec_requires_must_exist(cluster: Cluster) -> None:
    del cluster.objects["/apis/scheduling.volcano.sh/v1beta1"]
    del cluster.objects["/apis/kueue.x-k8s.io/v1beta2"]
    checks = examined(spec_with(scheduler="volcano", queue="holdfast"))
    assert checks["queues.scheduling.volcano.sh"][0].outcome == "fail"
    assert "localqueues.kueue.x-k8s.io" not in checks
    assert examined(spec_with(scheduler="kueue", queue="holdfast"))["localqueues.kueue.x-k8s.io"][0].outcome == "fail"


@pytest.mark.parametrize("arguments", [[], ["--gang-scheduler-name=none"], ["--v=1"]])
def test_an_operator_without_gang_scheduling_is_reported(cluster: Cluster, arguments: list[str]) -> None:
    cluster.objects[DEPLOYMENTS]["items"][0]["spec"]["template"]["spec"]["containers"][0]["args"] = arguments
    assert only(examined(), "gang scheduling").outcome == "warn"
    finding = only(examined(spec_with(scheduler="volcano", queue="holdfast")), "gang scheduling")
    assert finding.outcome == "fail"
    assert "-n kubeflow deployment/training-operator" in finding.remedy
    (patch,) = json.loads(re.findall(r"-p '(.*)'", finding.remedy)[0])  # it must be JSON that kubectl accepts
    assert patch["value"] in ("--gang-scheduler-name=volcano", ["--gang-scheduler-name=volcano"])


def test_a_stopped_operator_is_reported(cluster: Cluster) -> None:
    cluster.objects[DEPLOYMENTS] = {"items": []}
    assert "training operator" in only(examined(), "gang scheduling").remedy


@pytest.mark.parametrize(
    ("actions", "missing"),
    [("enqueue, allocate, backfill", "preempt and reclaim"), ("enqueue, allocate, preempt, backfill", "reclaim")],
)
def test_actions_that_cannot_preempt_are_reported(cluster: Cluster, actions: str, missing: str) -> None:
    cluster.objects[ACTIONS]["data"]["volcano-scheduler.conf"] = f'actions: "{actions}"\ntiers: []'
    finding = only(examined(), "volcano actions")
    assert f"without {missing}" in finding.message
    for action in ("enqueue", "allocate", "preempt", "reclaim", "backfill"):
        assert finding.remedy.count(action) == 1


@pytest.mark.parametrize(
    ("path", "check"),
    [(QUEUE, "volcano queue"), (LOCAL_QUEUE, "kueue queue"), (PRIORITY, "priority class"), (ACTIONS, "volcano actions"),
     (f"{ACCOUNT}/holdfast-launcher", "service accounts")],
)  # fmt: skip
def test_a_missing_object_is_reported(cluster: Cluster, path: str, check: str) -> None:
    del cluster.objects[path]
    assert only(examined(), check).outcome == "warn"


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"scheduler": "volcano", "queue": "mine"}, "volcano queue"),
        ({"scheduler": "kueue", "queue": "mine"}, "kueue queue"),
        ({"priority_class": "mine"}, "priority class"),
    ],
)
def test_an_object_that_the_spec_names_must_be_there(cluster: Cluster, fields: dict[str, str], check: str) -> None:
    cluster.objects["/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/holdfast-standard"] = {"value": 1}
    finding = only(examined(spec_with(**fields)), check)
    assert finding.outcome == "fail"
    assert "'mine'" in finding.message


def test_a_device_that_exceeds_every_node_is_reported(cluster: Cluster) -> None:
    spec = spec_with(accelerator="nvidia", resources={"extended": {"vpc.amazonaws.com/efa": 4}})
    node = {"status": {"allocatable": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}}}
    cluster.objects["/api/v1/nodes"] = {"items": [{"status": {"allocatable": {"cpu": "4"}}}, node]}
    assert examined(spec) == {}
    node["status"]["allocatable"]["vpc.amazonaws.com/efa"] = "3"
    finding = only(examined(spec), "devices")
    assert finding.outcome == "warn"
    assert "no node has 4 of vpc.amazonaws.com/efa: the most is 3" in finding.message


@pytest.mark.parametrize(("placement", "outcome"), [("prefer", "warn"), ("require", "fail")])
def test_neighbours_that_volcano_does_not_know_are_reported(cluster: Cluster, placement: str, outcome: str) -> None:
    spec = spec_with(
        scheduler="volcano", job="volcano", queue="holdfast", topology={"placement": placement, "tier": 1}
    )  # fmt: skip
    assert only(examined(spec), "topology").outcome == outcome
    cluster.objects["/apis/topology.volcano.sh/v1alpha1/hypernodes"] = {"items": [{"spec": {"tier": 2}}]}
    assert "tiers are [2]" in only(examined(spec), "topology").message
    cluster.objects["/apis/topology.volcano.sh/v1alpha1/hypernodes"]["items"].append({"spec": {"tier": 1}})
    assert examined(spec) == {}


def test_a_resource_without_kueue_quota_is_reported(cluster: Cluster) -> None:
    spec = spec_with(scheduler="kueue", queue="holdfast", resources={"extended": {"rdma/hca": 1}})
    cluster.objects["/api/v1/nodes"] = {"items": [{"status": {"allocatable": {"rdma/hca": "1k"}}}]}
    cluster.objects["/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/holdfast-standard"] = {"value": 1}
    path = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/holdfast"
    assert "no ClusterQueue holdfast" in only(examined(spec), "kueue quota").message
    cluster.objects[path] = {"spec": {"resourceGroups": [{"coveredResources": ["cpu", "memory"]}]}}
    assert "no quota of rdma/hca" in only(examined(spec), "kueue quota").message
    cluster.objects[path]["spec"]["resourceGroups"].append({"coveredResources": ["rdma/hca"]})
    assert examined(spec) == {}


def test_a_queue_that_admits_nothing_is_reported_with_its_reason(cluster: Cluster) -> None:
    (condition,) = cluster.objects[LOCAL_QUEUE]["status"]["conditions"]
    condition |= {"status": "False", "message": "Can't submit new workloads to clusterQueue"}
    assert "Can't submit" in only(examined(), "kueue queue").message
    cluster.objects[LOCAL_QUEUE]["status"] = {}
    cluster.objects[QUEUE]["status"]["state"] = "Closed"
    assert "Closed" in only(examined(), "volcano queue").message


def test_nodes_with_accelerators_are_counted(cluster: Cluster) -> None:
    spec = {"accelerator": "nvidia", "image": "registry.example/train:1"}
    assert "accelerators" not in examined(spec_with(**spec))
    assert "1 of 1 nodes" in examined(spec_with(**spec, nodes={"min": 2, "max": 2}))["accelerators"][0].message
    assert "0 of 0 nodes" in examined(spec_with(**spec, node_selector={"pool": "b"}))["accelerators"][0].message


@pytest.mark.parametrize(("offered", "processes", "fit"), [(1, 2, 0), (2, 2, 1), (3, 2, 1), (1, 1, 1), (0, 1, 0)])
def test_a_node_counts_when_it_has_exactly_what_one_node_of_the_gang_takes_or_more(
    cluster: Cluster, offered: int, processes: int, fit: int
) -> None:
    (node,) = cluster.objects["/api/v1/nodes"]["items"]
    node["status"]["allocatable"]["nvidia.com/gpu"] = str(offered)
    spec = spec_with(accelerator="nvidia", image="registry.example/train:1", nodes={"min": 1, "max": 1})
    parallel = spec.parallel.model_copy(update={"processes": processes})
    checks = examined(spec.model_copy(update={"parallel": parallel}))
    assert ("accelerators" not in checks) is bool(fit)
    if not fit:
        assert f"0 of 1 nodes that fit cluster.node_selector offer {processes}" in checks["accelerators"][0].message


@pytest.mark.parametrize(
    ("nodes", "cores", "mib", "outcome"),
    [(2, 4, 8192, "ok"), (3, 5, 8193, "ok"), (1, 4, 8192, "fail"), (2, 3, 8192, "warn"), (2, 4, 8191, "warn")],
)
def test_a_partition_of_slurm_that_fits_exactly_is_fine(nodes: int, cores: int, mib: int, outcome: str) -> None:
    spec = parse_spec(
        "{name: a, data: {sources: [{uri: x}]}}",
        ("cluster.nodes={min: 2, max: 2}", "cluster.resources={cpu: 4, memory: 8Gi}", "training.global_batch=16"),
    )
    partition = Partition("p", True, True, nodes, cores, mib)
    assert _partition("p", {"p": partition}, spec).outcome == outcome


def test_nodes_without_fp8_support_are_reported(cluster: Cluster) -> None:
    spec = spec_with(accelerator="nvidia").model_copy(
        update={"training": spec_with().training.model_copy(update={"precision": "fp8"})}
    )
    (node,) = cluster.objects["/api/v1/nodes"]["items"]
    assert examined(spec) == {}, "a node that says nothing is not judged"
    node["metadata"] |= {
        "name": "a100",
        "labels": {"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "0"},
    }
    finding = only(examined(spec), "accelerators")
    assert finding.outcome == "warn"
    assert "1 of 1 nodes" in finding.message and "a100" in finding.message
    node["metadata"]["labels"]["nvidia.com/gpu.compute.minor"] = "9"
    assert examined(spec) == {}


@pytest.mark.parametrize("scheduler", ["default", "kueue"])
def test_a_required_topology_level_must_be_known_to_the_scheduler(cluster: Cluster, scheduler: str) -> None:
    level = "topology.kubernetes.io/rack"
    wish = {"placement": "require", "level": level}
    spec = spec_with(scheduler=scheduler, queue="holdfast", topology=wish, image="registry.example/train:1")
    assert examined(spec)["places"][0].outcome == "fail"
    cluster.objects["/apis/kueue.x-k8s.io/v1beta2/topologies"] = {
        "items": [{"spec": {"levels": [{"nodeLabel": level}]}}]
    }
    cluster.objects[NODES]["items"][0]["metadata"]["labels"][level] = "r1"
    assert "places" not in examined(spec)
