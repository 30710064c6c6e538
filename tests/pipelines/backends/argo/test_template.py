"""Every example on Argo: compared with reviewed files, and checked against the schema and for consistency.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/pipelines/backends/argo/test_template.py,
and read the difference in Git.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.kubernetes.schemas import validate
from holdfast.pipelines.backends.argo import argo_objects, argo_text, check, schedules, template_name
from holdfast.spec import Spec, SpecError, load_spec, parse_spec
from tests.golden_files import assert_golden, golden_of

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"), key=lambda path: path.stem != "quickstart")  # the base first
GOLDEN = Path(__file__).parent / "golden"
NIGHTLY = "schedule.cron=0 3 * * *"


def spec(*overrides: str) -> Spec:
    return parse_spec("{name: a, data: {sources: [{uri: x}]}}", overrides)


def templates(thing: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {template["name"]: template for template in thing["spec"]["templates"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_its_golden_file(example: Path) -> None:
    assert_golden(argo_text(load_spec(example, [NIGHTLY])), *golden_of(GOLDEN, example.stem))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_objects_of_an_example_match_the_official_schema_and_are_consistent(example: Path) -> None:
    for artifacts in ("true", "false"):
        manifests = argo_objects(load_spec(example, [NIGHTLY, f"cluster.argo_artifacts={artifacts}"]))
        for manifest in manifests:
            validate(manifest)
        assert check(manifests) == []


def test_every_file_of_a_step_is_in_a_writable_volume() -> None:
    for template in templates(argo_objects(spec())[0]).values():
        if container := template.get("container"):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            inputs, outputs = template["inputs"]["artifacts"], template.get("outputs", {}).get("artifacts", [])
            for file in (*inputs, *outputs):
                assert any(Path(file["path"]).is_relative_to(mount) for mount in mounts), file["path"]


def test_the_same_spec_gives_the_same_bytes() -> None:
    assert argo_text(spec(NIGHTLY)) == argo_text(spec(NIGHTLY))


def test_the_command_writes_what_kubectl_takes(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from holdfast.pipelines.cli import app

    (tmp_path / "spec.yaml").write_text("{name: a, data: {sources: [{uri: x}]}, schedule: {every_minutes: 5}}")
    result = CliRunner().invoke(app, ["compile", str(tmp_path / "spec.yaml"), "--target", "argo", "--image", "i:1"])
    assert result.exit_code == 0, result.output
    assert list(yaml.safe_load_all(result.stdout)) == argo_objects(spec("schedule.every_minutes=5"), image="i:1")


def test_the_cluster_section_reaches_every_step() -> None:
    (manifest,) = argo_objects(
        spec(
            "cluster.namespace=training",
            "cluster.node_selector={pool: heavy}",
            "cluster.steps.node_selector={pool: light}",
            "cluster.steps.tolerations=[{key: dedicated, operator: Equal, value: x, effect: NoSchedule}]",
            "cluster.steps.labels={team: llm}",
            "cluster.steps.annotations={example.com/cost: low}",
            "cluster.secrets=[s3]",
            "cluster.pull_secrets=[pull]",
            "cluster.environment={A: 'b$(C)'}",
            "cluster.volumes=[{claim: corpora, path: /corpora, read_only: true}, {claim: corpora, path: /more}]",
            "cluster.steps.preprocess={cpu: 3, memory: 5Gi, ephemeral_storage: 40Gi}",
            "cluster.steps.evaluate.node_selector={disk: fast}",
            "cluster.steps.evaluate.tolerations=[{key: spot}]",
            "cluster.ttl_minutes=5",
        ),
        image="registry/holdfast@sha256:0",
    )
    whole = manifest["spec"]
    assert manifest["metadata"]["namespace"] == "training"
    assert whole["nodeSelector"] == {"pool": "light"}
    assert whole["tolerations"] == [{"key": "dedicated", "operator": "Equal", "value": "x", "effect": "NoSchedule"}]
    assert whole["podMetadata"]["labels"]["team"] == "llm"
    assert whole["podMetadata"]["annotations"] == {"example.com/cost": "low"}
    assert whole["imagePullSecrets"] == [{"name": "pull"}]
    assert whole["podGC"] == {"strategy": "OnPodCompletion", "deleteDelayDuration": "300s"}
    assert whole["ttlStrategy"] == {"secondsAfterSuccess": 300, "secondsAfterFailure": 7 * 24 * 3600}
    assert "activeDeadlineSeconds" not in whole
    assert [volume for volume in whole["volumes"] if "persistentVolumeClaim" in volume] == [
        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "corpora"}}
    ]
    steps = {name: template for name, template in templates(manifest).items() if "container" in template}
    assert steps.keys() == {"preprocess", "train", "evaluate", "register", "trigger", "notify"}
    for name, template in steps.items():
        container = template["container"]
        assert container["image"] == "registry/holdfast@sha256:0"
        settings = {"configMapRef": {"name": "holdfast-settings", "optional": True}}
        assert container["envFrom"] == [settings, {"secretRef": {"name": "s3"}}]
        assert {"name": "A", "value": "b$$(C)"} in container["env"]
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "claim-0"]
        assert [(mount["mountPath"], mount.get("readOnly")) for mount in mounts] == [
            ("/corpora", True), ("/more", None)
        ]  # fmt: skip
        requests = container["resources"]["requests"]
        assert requests["memory"] == {"preprocess": "5Gi", "evaluate": "8Gi"}.get(name, "2Gi")
        assert requests["ephemeral-storage"] == {"preprocess": "40Gi", "evaluate": "16Gi"}.get(name, "4Gi")
        assert ("HOLDFAST_CACHE_GIB", {"preprocess": "30", "evaluate": "12"}.get(name, "3")) in {
            (variable["name"], variable.get("value")) for variable in container["env"]
        }
        assert template["nodeSelector"] == {"pool": "light"} | ({"disk": "fast"} if name == "evaluate" else {})
        assert [toleration["key"] for toleration in template["tolerations"]] == ["dedicated"] + ["spot"] * (
            name == "evaluate"
        )
        account = {"train": "holdfast-launcher", "notify": "holdfast-notify"}.get(name, "holdfast-step")
        assert template["serviceAccountName"] == account


def test_every_pod_is_restricted_and_may_write_to_one_folder() -> None:
    (manifest,) = argo_objects(spec())
    security = manifest["spec"]["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for template in templates(manifest).values():
        if "container" in template:
            assert template["container"]["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }


def test_only_train_gets_the_launcher_and_time_to_leave() -> None:
    (manifest,) = argo_objects(spec("checkpoint.grace_seconds=100"))
    launchers = [
        name for name, template in templates(manifest).items()
        if {"name": "HOLDFAST_LAUNCHER", "value": "kubernetes"} in template.get("container", {}).get("env", ())
    ]  # fmt: skip
    assert launchers == ["train"]
    patch = json.loads(templates(manifest)["train"]["podSpecPatch"])
    assert patch["terminationGracePeriodSeconds"] > 100
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in templates(manifest)["train"]["container"]["env"] if "valueFrom" in variable
    }  # fmt: skip
    assert fields["HOLDFAST_POD_NAME"] == "metadata.name"
    assert fields["HOLDFAST_POD_UID"] == "metadata.uid"
    assert fields["HOLDFAST_POD_NAMESPACE"] == "metadata.namespace"
    assert fields["HOLDFAST_NODE_NAME"] == "spec.nodeName"


def test_an_accelerator_slice_is_used_by_evaluate_only() -> None:
    (manifest,) = argo_objects(spec("cluster.accelerator=nvidia", "cluster.slice=1g.10gb"))
    sharing = {
        name for name, template in templates(manifest).items()
        if "nvidia.com/mig-1g.10gb" in template.get("container", {}).get("resources", {}).get("limits", {})
    }  # fmt: skip
    assert sharing == {"evaluate"}
    assert templates(manifest)["evaluate"]["container"]["image"].startswith("holdfast-train-nvidia:")
    (taint,) = templates(manifest)["evaluate"]["tolerations"]
    assert (taint["key"], taint["operator"]) == ("nvidia.com/gpu", "Exists")


def test_a_trigger_that_scores_the_champion_has_a_pod_like_that_of_evaluate() -> None:
    overrides = ("cluster.accelerator=nvidia", "cluster.steps.evaluate={memory: 9Gi, accelerators: 2}")
    for decay, memory, accelerators in (("null", "2Gi", None), ("0.1", "9Gi", "2")):
        (manifest,) = argo_objects(spec(*overrides, f"schedule.max_decay={decay}"))
        limits = templates(manifest)["trigger"]["container"]["resources"]["limits"]
        assert (limits["memory"], limits.get("nvidia.com/gpu")) == (memory, accelerators)


def test_only_the_step_that_writes_the_service_may_write_one() -> None:
    for overrides, account in (((), "holdfast-step"), (("serving.kserve={namespace: models}",), "holdfast-serving")):
        (manifest,) = argo_objects(spec("store=s3://b/p", *overrides))
        by_name = templates(manifest)
        assert by_name["register"]["serviceAccountName"] == account
        assert by_name["evaluate"]["serviceAccountName"] == "holdfast-step"
        assert by_name["train"]["serviceAccountName"] == "holdfast-launcher"


def test_argos_own_containers_fit_the_restricted_standard_and_a_quota() -> None:
    (manifest,) = argo_objects(spec())
    patch = json.loads(manifest["spec"]["podSpecPatch"])
    for container in (*patch["initContainers"], *patch["containers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]["requests"]) == set(container["resources"]["limits"])
    assert [entry["name"] for entry in patch["initContainers"]] == ["init"]
    assert [entry["name"] for entry in patch["containers"]] == ["wait"]


def test_a_stock_argo_has_no_artifact_repository_so_nothing_is_put_there() -> None:
    (manifest,) = argo_objects(spec())
    assert "archiveLogs" not in manifest["spec"]
    assert not any(template.get("outputs", {}).get("artifacts") for template in templates(manifest).values())


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(1, "* * * * *"), (15, "*/15 * * * *"), (60, "0 * * * *"), (180, "0 */3 * * *"), (1440, "0 0 * * *"),
     (7, "@every 7m"), (90, "@every 90m"), (300, "@every 300m"), (10080, "@every 10080m")],
)  # fmt: skip
def test_an_interval_becomes_cron_schedules(minutes: int, expected: str) -> None:
    assert schedules(spec(f"schedule.every_minutes={minutes}")) == [expected]


def test_a_scheduled_workflow_evaluates_the_trigger_first_and_never_overlaps() -> None:
    template, cron = argo_objects(
        spec("schedule.cron=0 3 * * 1", "schedule.timezone=Europe/Berlin", "schedule.starting_deadline_seconds=30"),
        namespace="n",
    )
    assert cron["metadata"]["namespace"] == template["metadata"]["namespace"] == "n"
    assert cron["spec"]["schedules"] == ["0 3 * * 1"]
    assert (cron["spec"]["timezone"], cron["spec"]["concurrencyPolicy"]) == ("Europe/Berlin", "Forbid")
    assert cron["spec"]["startingDeadlineSeconds"] == 30
    workflow = cron["spec"]["workflowSpec"]
    assert workflow["entrypoint"] == "retrain"
    assert workflow["workflowTemplateRef"] == {"name": template["metadata"]["name"]}
    assert template["spec"]["entrypoint"] == "train-and-register"


def test_without_a_schedule_there_is_no_cron_workflow() -> None:
    from holdfast.pipelines.backends.argo import cron_workflow

    assert [manifest["kind"] for manifest in argo_objects(spec())] == ["WorkflowTemplate"]
    with pytest.raises(SpecError, match="neither cron nor every_minutes"):
        cron_workflow(spec())


def test_names_fit_argo_and_stay_apart() -> None:
    long = [spec(f"name=a{'b' * 45}{last}x") for last in "cd"]
    names = {template_name(step) for step in long}
    assert len(names) == 2
    assert all(len(name) <= 52 for name in names)
    assert template_name(spec()) == "holdfast-a"


def test_the_sensor_starts_an_existing_entrypoint() -> None:
    sensor = yaml.safe_load((ROOT / "manifests/components/argo-events/sensor.yaml").read_text(encoding="utf-8"))
    (trigger,) = sensor["spec"]["triggers"]
    workflow = trigger["template"]["k8s"]["source"]["resource"]
    assert workflow["spec"]["entrypoint"] == "retrain"
    assert check([*argo_objects(load_spec(ROOT / "examples/quickstart.yaml")), workflow]) == []
    workflow["spec"]["entrypoint"] = "retrian"
    (problem,) = check([*argo_objects(load_spec(ROOT / "examples/quickstart.yaml")), workflow])
    assert "Workflow holdfast-data-: entrypoint names the template 'retrian'" in problem
