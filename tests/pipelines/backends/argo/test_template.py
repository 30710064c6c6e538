"""What every example becomes on Argo: compared with files under review, held against the schema and against itself.

To accept a change: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/pipelines/backends/argo/test_template.py,
and read the difference in Git.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.components.spec import Spec, SpecError, load_spec, parse_spec
from holdfast.pipelines.backends.argo import argo_objects, argo_text, check, schedules, template_name
from holdfast.pipelines.backends.argo.template import spec_text
from tests.kubernetes_schemas import needs_schemas, validate_argo
from tests.pipelines.backends.argo.emulator import substituted

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
NIGHTLY = "schedule.cron=0 3 * * *"


def spec(*overrides: str) -> Spec:
    return parse_spec("{name: a, data: {sources: [{uri: x}]}}", overrides)


def templates(thing: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {template["name"]: template for template in thing["spec"]["templates"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_its_golden_file(example: Path) -> None:
    text = argo_text(load_spec(example, [NIGHTLY]))
    golden = GOLDEN / f"{example.stem}.yaml"
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(golden.read_text(encoding="utf-8")))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {path.stem for path in EXAMPLES}


@needs_schemas
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_becomes_fits_the_official_schema_and_itself(example: Path) -> None:
    for artifacts in (True, False):
        found = argo_objects(load_spec(example, [NIGHTLY]), artifacts=artifacts)
        for thing in found:
            validate_argo(thing)
        assert check(found) == []


def test_every_file_of_a_step_lies_in_a_volume_that_may_be_written_to() -> None:
    for template in templates(argo_objects(spec())[0]).values():
        if container := template.get("container"):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            given, made = template["inputs"]["artifacts"], template.get("outputs", {}).get("artifacts", [])
            for file in (*given, *made):
                assert any(Path(file["path"]).is_relative_to(mount) for mount in mounts), file["path"]


def test_the_same_spec_gives_the_same_bytes() -> None:
    assert argo_text(spec(NIGHTLY)) == argo_text(spec(NIGHTLY))


def test_the_command_writes_what_kubectl_takes(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from holdfast.pipelines.cli import app

    (tmp_path / "spec.yaml").write_text("{name: a, data: {sources: [{uri: x}]}, schedule: {every_minutes: 5}}")
    said = CliRunner().invoke(app, ["compile", str(tmp_path / "spec.yaml"), "--target", "argo", "--image", "i:1"])
    assert said.exit_code == 0, said.output
    assert list(yaml.safe_load_all(said.stdout)) == argo_objects(spec("schedule.every_minutes=5"), image="i:1")


def test_the_cluster_section_reaches_every_step() -> None:
    (thing,) = argo_objects(
        spec(
            "cluster.namespace=training",
            "cluster.node_selector={pool: light}",
            "cluster.tolerations=[{key: dedicated, operator: Equal, value: x, effect: NoSchedule}]",
            "cluster.secrets=[s3]",
            "cluster.pull_secrets=[pull]",
            "cluster.environment={A: 'b$(C)'}",
            "cluster.volumes=[{claim: corpora, path: /corpora, read_only: true}, {claim: corpora, path: /more}]",
            "cluster.steps={cpu: 3, memory: 5Gi}",
            "cluster.keep_minutes=5",
        ),
        image="registry/holdfast@sha256:0",
    )
    whole = thing["spec"]
    assert thing["metadata"]["namespace"] == "training"
    assert whole["nodeSelector"] == {"pool": "light"}
    assert whole["tolerations"] == [{"key": "dedicated", "operator": "Equal", "value": "x", "effect": "NoSchedule"}]
    assert whole["imagePullSecrets"] == [{"name": "pull"}]
    assert whole["podGC"] == {"strategy": "OnPodCompletion", "deleteDelayDuration": "300s"}
    assert whole["ttlStrategy"] == {"secondsAfterSuccess": 300, "secondsAfterFailure": 7 * 24 * 3600}
    assert "activeDeadlineSeconds" not in whole
    assert [volume for volume in whole["volumes"] if "persistentVolumeClaim" in volume] == [
        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "corpora"}}
    ]
    steps = {name: template for name, template in templates(thing).items() if "container" in template}
    assert steps.keys() == {"preprocess", "train", "evaluate", "register", "trigger", "notify"}
    for name, template in steps.items():
        container = template["container"]
        assert container["image"] == "registry/holdfast@sha256:0"
        assert {"secretRef": {"name": "s3"}} in container["envFrom"]
        assert {"name": "A", "value": "b$$(C)"} in container["env"]
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "claim-0"]
        assert [(mount["mountPath"], mount.get("readOnly")) for mount in mounts] == [
            ("/corpora", True), ("/more", None)
        ]  # fmt: skip
        asked = container["resources"]["requests"]
        assert asked["memory"] == ("5Gi" if name in ("preprocess", "evaluate") else "2Gi")
        assert template["serviceAccountName"] == ("holdfast-launcher" if name == "train" else "holdfast-step")


def test_every_pod_is_restricted_and_may_write_to_one_folder() -> None:
    (thing,) = argo_objects(spec())
    security = thing["spec"]["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for template in templates(thing).values():
        if "container" in template:
            assert template["container"]["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }


def test_only_train_gets_the_launcher_and_time_to_leave() -> None:
    (thing,) = argo_objects(spec("checkpoint.grace_seconds=100"))
    launchers = [
        name for name, template in templates(thing).items()
        if {"name": "HOLDFAST_LAUNCHER", "value": "kubernetes"} in template.get("container", {}).get("env", ())
    ]  # fmt: skip
    assert launchers == ["train"]
    patch = json.loads(templates(thing)["train"]["podSpecPatch"])
    assert patch["terminationGracePeriodSeconds"] > 100
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in templates(thing)["train"]["container"]["env"] if "valueFrom" in one
    }  # fmt: skip
    assert fields["HOLDFAST_POD_NAME"] == "metadata.name"
    assert fields["HOLDFAST_POD_UID"] == "metadata.uid"
    assert fields["HOLDFAST_NAMESPACE"] == "metadata.namespace"


def test_a_share_of_an_accelerator_goes_to_evaluate_alone() -> None:
    (thing,) = argo_objects(spec("cluster.accelerator=nvidia", "cluster.slice=1g.10gb"))
    sharing = {
        name for name, template in templates(thing).items()
        if "nvidia.com/mig-1g.10gb" in template.get("container", {}).get("resources", {}).get("limits", {})
    }  # fmt: skip
    assert sharing == {"evaluate"}
    assert templates(thing)["evaluate"]["container"]["image"].startswith("holdfast-train-nvidia:")


def test_without_an_artifact_repository_nothing_is_put_there() -> None:
    (thing,) = argo_objects(spec(), artifacts=False)
    assert "archiveLogs" not in thing["spec"]
    assert not any(template.get("outputs", {}).get("artifacts") for template in templates(thing).values())


@pytest.mark.parametrize(
    "prompt",
    ["{{workflow.name}} and {{ x }}", "{{{x}}}", 'a "quote", a \\ and\na line', "{{=1+1}}", "{{{{", "é \u2028"],
)
def test_a_spec_survives_being_a_parameter(prompt: str) -> None:
    given = spec(f"evaluation.prompts={json.dumps([prompt])}")
    text = spec_text(given)
    assert "{{" not in text
    passed = substituted({"raw": "{{workflow.parameters.spec}}"}, {"workflow.parameters.spec": text})["raw"]
    assert parse_spec(passed) == given


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(1, "* * * * *"), (15, "*/15 * * * *"), (60, "0 * * * *"), (180, "0 */3 * * *"), (1440, "0 0 * * *"),
     (7, "@every 7m"), (90, "@every 90m"), (300, "@every 300m"), (10080, "@every 10080m")],
)  # fmt: skip
def test_an_interval_is_cron_where_cron_can_say_it(minutes: int, expected: str) -> None:
    assert schedules(spec(f"schedule.every_minutes={minutes}")) == [expected]


def test_the_schedule_asks_first_and_never_overtakes_itself() -> None:
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

    assert [thing["kind"] for thing in argo_objects(spec())] == ["WorkflowTemplate"]
    with pytest.raises(SpecError, match="neither cron nor every_minutes"):
        cron_workflow(spec())


def test_names_fit_argo_and_stay_apart() -> None:
    long = [spec(f"name=a{'b' * 45}{last}x") for last in "cd"]
    names = {template_name(one) for one in long}
    assert len(names) == 2
    assert all(len(name) <= 52 for name in names)
    assert template_name(spec()) == "holdfast-a"


def test_the_sensor_starts_a_way_in_that_is_there() -> None:
    sensor = yaml.safe_load((ROOT / "manifests/components/argo-events/sensor.yaml").read_text(encoding="utf-8"))
    (trigger,) = sensor["spec"]["triggers"]
    workflow = trigger["template"]["k8s"]["source"]["resource"]
    assert workflow["spec"]["entrypoint"] == "retrain"
    assert check([*argo_objects(load_spec(ROOT / "examples/quickstart.yaml")), workflow]) == []
    workflow["spec"]["entrypoint"] = "retrian"
    (problem,) = check([*argo_objects(load_spec(ROOT / "examples/quickstart.yaml")), workflow])
    assert "Workflow holdfast-data-: entrypoint names the template 'retrian'" in problem
