"""The guarantees of emitted objects, one test each."""

import re
from typing import Any

import pytest

from holdfast.launch.emitters import has_key, key_secret, objects_for, render, training_job, volcano
from holdfast.launch.interface import Job
from holdfast.launch.kubernetes.schemas import validate
from holdfast.runtime.secrets import NOT_FOR_RANKS, SITE_KEYS_OF_RANKS
from holdfast.spec import ExitCode, SpecError, parse_spec

SPEC = """
name: small
store: s3://bucket/prefix
data: {sources: [{uri: x}]}
training: {global_batch: 48, micro_batch: 2, determinism: "off"}
parallel: {processes: 2, threads: 3}
checkpoint: {grace_seconds: 30.5}
cluster: {accelerator: nvidia, nodes: {min: 2, max: 2}}
"""
KINDS = {
    "pytorchjob": (),
    "trainjob": ("cluster.job=trainjob",),
    "volcano": ("cluster.job=volcano", "cluster.scheduler=volcano"),
}


def job(*overrides: str, launch: int = 1, excluded: tuple[str, ...] = (), store: str = "s3://bucket/prefix") -> Job:
    return training_job(parse_spec(SPEC, overrides), "0123456789abcdef", launch, store, frozenset(excluded))


def only(*overrides: str, **keywords: Any) -> dict[str, Any]:
    return objects_for(job(*overrides, **keywords))[-1]


def pods(kind: str, *overrides: str, **keywords: Any) -> list[dict[str, Any]]:
    """Every pod template of a job."""
    return pods_of(kind, objects_for(job(*KINDS[kind], *overrides, **keywords)))


def pods_of(kind: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pod template of the objects of a job."""
    if kind == "pytorchjob":
        return [replica["template"] for replica in objects[0]["spec"]["pytorchReplicaSpecs"].values()]
    if kind == "trainjob":
        return [
            inner["template"]["spec"]["template"] for inner in objects[0]["spec"]["template"]["spec"]["replicatedJobs"]
        ]
    return [task["template"] for task in objects[0]["spec"]["tasks"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_no_permissions_and_never_restarts(kind: str) -> None:
    for template in pods(kind):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["restartPolicy"] == "Never"
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_time_to_save_memory_for_its_ranks_and_one_accelerator_each(kind: str) -> None:
    for template in pods(kind):
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert pod["terminationGracePeriodSeconds"] > 30.5 + 10
        assert "--shutdown-timeout=30" in container["command"]
        limits = {"memory": "16Gi", "ephemeral-storage": "16Gi", "nvidia.com/gpu": 2}
        assert container["resources"] == {"limits": limits, "requests": {"cpu": "4", **limits}}
        assert {"name": "OMP_NUM_THREADS", "value": "3"} in container["env"]
        shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
        assert shared in pod["volumes"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_referred_to_and_bad_nodes_avoided(kind: str) -> None:
    for template in pods(kind, "cluster.secrets=[s3, hub]", excluded=("node-b", "node-a")):
        (container,) = template["spec"]["containers"]
        settings = {"configMapRef": {"name": "holdfast-settings", "optional": True}}
        assert container["envFrom"] == [settings, {"secretRef": {"name": "s3"}}, {"secretRef": {"name": "hub"}}]
        required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a", "node-b"]}
        assert required == {"nodeSelectorTerms": [{"matchExpressions": [avoid]}]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_sees_the_settings_of_the_place_its_secret_and_itself(kind: str) -> None:
    for template in pods(kind):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "holdfast-settings", "optional": True}}], (
            "unknown keys of the site's Secret do not reach ranks"
        )
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        for withheld in (*NOT_FOR_RANKS, "MLFLOW_TRACKING_PASSWORD", "HOLDFAST_WEBHOOK", "MODEL_REGISTRY_TOKEN"):
            assert values[withheld] == "", "this goes before what the Secret has"
        fields = {entry["name"]: entry["valueFrom"] for entry in container["env"] if "valueFrom" in entry}
        fields.pop("HOLDFAST_NODE_RANK", None)  # see the test of the rendezvous
        key = {"name": "holdfast-0123456789abcdef-1-key", "key": "key"}
        assert fields.pop("HOLDFAST_LAUNCH_KEY") == {"secretKeyRef": key}
        for name in SITE_KEYS_OF_RANKS:
            assert fields.pop(name) == {"secretKeyRef": {"name": "holdfast-secrets", "key": name, "optional": True}}
        assert {name: value["fieldRef"]["fieldPath"] for name, value in fields.items()} == {
            "HOLDFAST_POD_NAME": "metadata.name",
            "HOLDFAST_POD_NAMESPACE": "metadata.namespace",
            "HOLDFAST_POD_UID": "metadata.uid",
            "HOLDFAST_NODE_NAME": "spec.nodeName",
        }
    for template in pods(kind, "cluster.settings=mine", "cluster.secrets=[]"):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "mine", "optional": True}}]
        assert not {entry["name"] for entry in container["env"]} & set(SITE_KEYS_OF_RANKS)
    for template in pods(kind, "cluster.environment={AWS_REGION: here}"):
        entries = [entry for entry in template["spec"]["containers"][0]["env"] if entry["name"] == "AWS_REGION"]
        assert entries == [{"name": "AWS_REGION", "value": "here"}], "the spec counts, and no name is there twice"


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_looks_like_a_reference_is_escaped(kind: str) -> None:
    for template in pods(kind, "cluster.environment={A: 'x $(B) $C'}"):
        (container,) = template["spec"]["containers"]
        assert {"name": "A", "value": "x $$(B) $C"} in container["env"]


def test_a_claim_that_is_mounted_twice_is_one_volume() -> None:
    volumes = "cluster.volumes=[{claim: c, path: /a}, {claim: c, path: /b, read_only: true}]"
    for template in pods("pytorchjob", volumes):
        claims = [volume for volume in template["spec"]["volumes"] if "persistentVolumeClaim" in volume]
        assert claims == [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "c"}}]
        assert template["spec"]["containers"][0]["volumeMounts"][-2:] == [
            {"name": "claim-0", "mountPath": "/a"},
            {"name": "claim-0", "mountPath": "/b", "readOnly": True},
        ]


def flags(thing: dict[str, Any]) -> dict[str, str]:
    """The flags of torchrun, with a single worker template."""
    (replica,) = thing["spec"]["pytorchReplicaSpecs"].values()
    (container,) = replica["template"]["spec"]["containers"]
    return dict(
        argument.lstrip("-").split("=", 1)
        for argument in container["command"]
        if argument.startswith("--") and "=" in argument
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_pytorchjob_is_workers_that_meet_at_the_first_so_that_no_container_is_put_before_them(count: int) -> None:
    manifest = only(f"cluster.nodes={{min: {count}, max: {count}, rendezvous_seconds: 60}}")
    assert {role: replica["replicas"] for role, replica in manifest["spec"]["pytorchReplicaSpecs"].items()} == {
        "Worker": count
    }
    arguments = flags(manifest)
    assert arguments["master-addr"] == f"{manifest['metadata']['name']}-worker-0"
    assert (arguments["nnodes"], arguments["node-rank"]) == (str(count), "$(HOLDFAST_NODE_RANK)")
    assert arguments["rdzv-conf"] == "timeout=60"
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    (index,) = [variable["valueFrom"] for variable in container["env"] if variable["name"] == "HOLDFAST_NODE_RANK"]
    assert index == {"fieldRef": {"fieldPath": "metadata.labels['training.kubeflow.org/replica-index']"}}


def test_a_pytorchjob_has_no_limit_of_restarts_at_which_its_operator_would_delete_what_failed() -> None:
    for nodes, policy in (("{min: 2, max: 2}", "Never"), ("{min: 1, max: 2}", "ExitCode")):
        spec = only(f"cluster.nodes={nodes}")["spec"]
        assert "backoffLimit" not in spec["runPolicy"]
        assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == policy


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_gets_no_service_mesh_sidecar(kind: str) -> None:
    for template in pods(kind):
        for place in ("labels", "annotations"):
            assert template["metadata"][place]["sidecar.istio.io/inject"] == "false"


def test_the_nodes_of_an_elastic_job_meet_under_the_name_of_their_launch() -> None:
    names = set()
    for launch in (1, 2):
        spec = only("cluster.nodes={min: 1, max: 3}", launch=launch)["spec"]
        assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
        assert set(spec["pytorchReplicaSpecs"]) == {"Worker"}
        assert spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 3, "maxRestarts": 10}
        arguments = flags({"spec": spec})
        assert arguments["max-restarts"] == "10"
        assert (arguments["nnodes"], arguments["rdzv-backend"]) == ("1:3", "c10d")
        assert arguments["rdzv-endpoint"] == f"holdfast-0123456789abcdef-{launch}-worker-0:23456"
        names.add(arguments["rdzv-id"])
    assert len(names) == 2


def test_spares_are_workers_more_that_no_gang_waits_for_and_that_have_no_seat() -> None:
    manifest = only("cluster.nodes={min: 2, max: 2}", "cluster.spares=3", "cluster.scheduler=volcano")
    spec = manifest["spec"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 5
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 5, "maxRestarts": 10}
    assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2}
    arguments = flags({"spec": spec})
    assert (arguments["nnodes"], arguments["rdzv-backend"], arguments["max-restarts"]) == ("2:2", "c10d", "10")
    assert arguments["rdzv-conf"].endswith(",spares=3")


def test_a_job_with_spares_fits_the_official_schema() -> None:
    validate(only("cluster.nodes={min: 2, max: 2}", "cluster.spares=3", "cluster.scheduler=volcano"))


def test_a_gang_begins_with_its_fewest_nodes() -> None:
    for nodes, fewest in (("{min: 2, max: 2}", 2), ("{min: 1, max: 3}", 1)):
        spec = only(f"cluster.nodes={nodes}", "cluster.scheduler=volcano")["spec"]
        assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": fewest}
    assert "schedulingPolicy" not in only()["spec"]["runPolicy"]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_a_kueue_job_starts_suspended_and_places_all_pods_together(kind: str) -> None:
    overrides = (
        "cluster.scheduler=kueue", "cluster.queue=q", "cluster.priority_class=high",
        "cluster.topology={placement: require, level: example.com/rack}",
    )  # fmt: skip
    manifest = objects_for(job(*KINDS[kind], *overrides))[-1]
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert manifest["spec"].get("suspend", manifest["spec"].get("runPolicy", {}).get("suspend")) is True
    for template in pods(kind, *overrides):
        annotations = template["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/podset-required-topology"] == "example.com/rack"
        assert "priorityClassName" not in template["spec"]
        assert "affinity" not in template["spec"]


def test_placement_for_the_default_scheduler_is_pod_affinity() -> None:
    for placement in ("require", "prefer", "any"):
        for template in pods("pytorchjob", f"cluster.topology={{placement: {placement}, level: rack}}"):
            affinity = template["spec"]["affinity"]["podAffinity"]
            assert ("requiredDuringSchedulingIgnoredDuringExecution" in affinity) == (placement == "require")
            preferences = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
            keys = [preference["podAffinityTerm"]["topologyKey"] for preference in preferences]
            assert keys == ["rack", "kubernetes.io/hostname"][placement != "prefer" :]


def test_volcano_gets_the_topology_of_its_jobs_and_of_trainjobs() -> None:
    overrides = ("cluster.scheduler=volcano", "cluster.topology={placement: require, tier: 2}", "cluster.queue=q")
    manifest = only("cluster.job=volcano", *overrides)
    assert manifest["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 2}
    runtime, _ = objects_for(job("cluster.job=trainjob", *overrides))
    group = runtime["spec"]["podGroupPolicy"]["volcano"]
    assert group == {"networkTopology": {"mode": "hard", "highestTierAllowed": 2}}
    assert runtime["spec"]["template"]["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "q"}


def test_a_volcano_job_that_is_followed_ends_whole_at_the_first_failure() -> None:
    first, waiting = only(*KINDS["volcano"])["spec"]["policies"]
    assert first == {"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}
    assert waiting["action"] == "TerminateJob"


def test_an_unfollowed_volcano_job_restarts_whole_except_after_a_permanent_exit_code() -> None:
    spec = volcano.emit(job(*KINDS["volcano"]), restarts=4)["spec"]
    assert spec["maxRetry"] == 4
    *codes, failed, _ = spec["policies"]
    assert failed["action"] == "RestartJob"
    assert all(policy["action"] == "TerminateJob" for policy in codes)
    permanent = {int(code) for code in ExitCode if not code.retryable} - {0}
    assert {policy["exitCode"] for policy in codes} == permanent


def test_a_trainjob_follows_its_runtime() -> None:
    runtime, train_job = objects_for(job("cluster.job=trainjob"))
    assert (runtime["kind"], train_job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_two_pod_templates_share_no_part_that_a_caller_could_change_in_both() -> None:
    launch_job = job()
    (first,), (second,) = (objects_for(launch_job)[0]["spec"]["pytorchReplicaSpecs"].values() for _ in range(2))
    first["template"]["spec"]["containers"][0]["image"] = "other"
    assert second["template"]["spec"]["containers"][0]["image"] != "other"


@pytest.mark.parametrize(("store", "right"), [("file:///home/me", False), ("file:///shared/x", True),
                                              ("file:///shared2", False), ("s3://bucket", True)])  # fmt: skip
def test_a_folder_store_is_refused_unless_every_pod_mounts_it(store: str, right: bool) -> None:
    overrides = ("cluster.volumes=[{claim: c, path: /shared}]",)
    if right:
        only(*overrides, store=store)
    else:
        with pytest.raises(SpecError, match=r"cluster\.volumes"):
            only(*overrides, store=store)


def test_an_unsupported_request_for_a_target_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    elastic = parse_spec(SPEC, ["cluster.nodes.min=1"])
    with pytest.raises(SpecError, match="a TrainJob is not elastic"):
        render(elastic, "trainjob")
    with pytest.raises(SpecError, match="use one of pytorchjob, trainjob, volcano"):
        render(elastic, "ray")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="s3://bucket/prefix"):
        render(parse_spec(SPEC, ["store=null"]), "pytorchjob")


def test_the_key_of_a_launch_is_only_in_the_secret_of_its_job() -> None:
    gang_job, alone = job(), job("cluster.nodes.min=1", "cluster.nodes.max=1")
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": gang_job.name, "uid": "1"}
    first, second = key_secret(gang_job, owner), key_secret(gang_job, owner)
    key = first["stringData"]["key"]
    assert len(key) >= 32 and key != second["stringData"]["key"]
    assert first["metadata"]["ownerReferences"] == [owner] and first["metadata"]["name"] == f"{gang_job.name}-key"
    assert not re.search(r"\b[0-9a-f]{64}\b", render(parse_spec(SPEC), "pytorchjob"))
    assert has_key(gang_job) and not has_key(alone)
    assert "HOLDFAST_LAUNCH_KEY" not in str(objects_for(alone))
