"""Placement and resources of a training job's pods, in every object that can contain them."""

from dataclasses import replace
from typing import Any

import pytest

from holdfast.launch import accelerators
from holdfast.launch.emitters import objects_for
from holdfast.launch.kubernetes.schemas import validate
from tests.launch.emitters.test_emitters import KINDS, job, pods, pods_of

FABRIC = (
    "cluster.resources.extended={rdma/hca_shared_devices_a: 1, vpc.amazonaws.com/efa: 4, hugepages-2Mi: 5Gi}",
    "cluster.capabilities=[IPC_LOCK]",
    "cluster.labels={team: llm, cost.example.com/center: '42'}",
    "cluster.annotations={k8s.v1.cni.cncf.io/networks: 'rail-0, rail-1'}",
    "cluster.network=efa",
)


def variables(template: dict[str, Any]) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


@pytest.mark.parametrize("kind", KINDS)
def test_fabric_devices_are_requested_with_their_capability(kind: str) -> None:
    for template in pods(kind, *FABRIC):
        (container,) = template["spec"]["containers"]
        for resource in container["resources"].values():
            assert resource["rdma/hca_shared_devices_a"] == "1"
            assert resource["vpc.amazonaws.com/efa"] == "4"
            assert resource["hugepages-2Mi"] == "5Gi"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_annotations_of_the_spec_are_on_the_pods_and_on_what_makes_them(kind: str) -> None:
    for metadata in [entry["metadata"] for entry in (*objects_for(job(*KINDS[kind], *FABRIC)), *pods(kind, *FABRIC))]:
        assert metadata["labels"]["team"] == "llm"
        assert metadata["labels"]["cost.example.com/center"] == "42"
        assert metadata["labels"]["holdfast/run-id"] == "0123456789abcdef"
        assert metadata["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rail-0, rail-1"


UNPLACED = ("volcano", "kueue")  # Kueue does not place a Volcano Job


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [(kind, scheduler) for kind in KINDS for scheduler in ("default", "kueue") if (kind, scheduler) != UNPLACED],
)
def test_all_of_it_together_fits_the_official_schemas(kind: str, scheduler: str) -> None:
    overrides = ["cluster.topology={placement: require, numa: require}", *FABRIC]
    if kind == "pytorchjob" or scheduler == "kueue":
        overrides += [f"cluster.scheduler={scheduler}"]
    overrides += ["cluster.queue=q"] if scheduler == "kueue" else []
    for manifest in objects_for(job(*KINDS[kind], *overrides)):
        validate(manifest)


@pytest.mark.parametrize("network", ["infiniband", "roce"])
@pytest.mark.parametrize("accelerator", ["nvidia", "amd"])
def test_collectives_over_remote_memory_access_never_fall_back_to_sockets(accelerator: str, network: str) -> None:
    assert accelerators.network_variables(accelerator, network) == {"NCCL_NET": "IB"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_was_named_is_used_or_the_job_fails(kind: str) -> None:
    for template in pods(kind, *FABRIC):
        environment = variables(template)
        assert (environment["NCCL_NET"], environment["FI_PROVIDER"]) == ("AWS Libfabric", "efa")
        # Ranks must not use a second interface of the pod for their rendezvous.
        assert (environment["NCCL_SOCKET_IFNAME"], environment["GLOO_SOCKET_IFNAME"]) == ("=eth0", "eth0")
    for template in pods(kind):
        assert not {"NCCL_NET", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(variables(template))
    for template in pods(kind, "cluster.network=roce", "cluster.environment={NCCL_NET: mine}"):
        assert variables(template)["NCCL_NET"] == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_the_dataset_cache_fits_the_requested_ephemeral_storage(kind: str) -> None:
    for template in pods(kind, "cluster.resources.ephemeral_storage=100Gi"):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["requests"]["ephemeral-storage"] == "100Gi"
        assert {"name": "scratch", "emptyDir": {"sizeLimit": "100Gi"}} in template["spec"]["volumes"]
        assert variables(template)["HOLDFAST_CACHE_GIB"] == "75"
    for template in pods(kind, "cluster.environment={HOLDFAST_CACHE_GIB: '3'}"):
        assert variables(template)["HOLDFAST_CACHE_GIB"] == "3"


def test_a_kueue_job_requests_no_ephemeral_storage() -> None:
    """Otherwise Kueue refuses the whole job: resource ephemeral-storage unavailable in ClusterQueue."""
    for template in pods("pytorchjob", "cluster.scheduler=kueue", "cluster.queue=q"):
        (container,) = template["spec"]["containers"]
        assert "ephemeral-storage" not in container["resources"]["requests"]


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_one_job_prefer_different_machines(kind: str) -> None:
    for template in pods(kind):
        (preference,) = template["spec"]["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        assert preference["podAffinityTerm"] == {
            "labelSelector": {"matchLabels": {"holdfast/run-id": "0123456789abcdef", "holdfast/launch": "1"}},
            "topologyKey": "kubernetes.io/hostname",
        }
    for template in pods(kind, "cluster.nodes={min: 1, max: 1}"):
        assert "podAntiAffinity" not in template["spec"].get("affinity", {})


@pytest.mark.parametrize("kind", KINDS)
def test_cores_of_one_numa_node_need_a_pod_whose_limits_are_its_requests(kind: str) -> None:
    for setting, policy in (("prefer", "best-effort"), ("require", "single-numa-node")):
        for template in pods(kind, f"cluster.topology.numa={setting}"):
            (container,) = template["spec"]["containers"]
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert container["resources"]["limits"]["cpu"] == "4"
        if kind == "volcano":
            (task,) = objects_for(job(*KINDS[kind], f"cluster.topology.numa={setting}"))[0]["spec"]["tasks"]
            assert task["topologyPolicy"] == policy


def test_a_tpu_is_a_word_that_the_emitters_know() -> None:
    """The rules refuse to train on a TPU; the object is what such a job would be on GKE."""
    place = {"cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice", "cloud.google.com/gke-tpu-topology": "2x4"}
    plain = job("cluster.accelerator=cpu")
    tpu_job = replace(plain, cluster=plain.cluster.model_copy(update={"accelerator": "tpu", "node_selector": place}))
    (manifest,) = objects_for(tpu_job)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] == 2
        assert pod["nodeSelector"] == place
        assert {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


@pytest.mark.parametrize("kind", KINDS)
def test_autoscalers_do_not_evict_a_rank_unless_the_spec_allows_it(kind: str) -> None:
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    for template in pods(kind):
        assert template["metadata"]["annotations"][key] == "false"
        assert template["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    for template in pods(kind, f"cluster.annotations={{{key}: 'true'}}"):
        assert template["metadata"]["annotations"][key] == "true"


@pytest.mark.parametrize("kind", KINDS)
def test_the_spot_cloud_of_the_spec_is_in_every_pods_environment(kind: str) -> None:
    for template in pods(kind, "cluster.spot=aws"):
        assert variables(template)["HOLDFAST_SPOT"] == "aws"
    assert all("HOLDFAST_SPOT" not in variables(template) for template in pods(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_preferred_to_a_node_that_leaves_and_one_that_failed_is_ruled_out(kind: str) -> None:
    placed = replace(job(*KINDS[kind]), excluded_nodes=frozenset({"bad"}), leaving_nodes=frozenset({"gone"}))
    objects = objects_for(placed)
    for manifest in objects:
        validate(manifest)
    for template in pods_of(kind, objects):
        affinity = template["spec"]["affinity"]["nodeAffinity"]
        (preference,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [rule["values"] for rule in preference["preference"]["matchExpressions"]] == [["gone"]]
        assert [rule["values"] for rule in term["matchExpressions"]] == [["bad"]]
