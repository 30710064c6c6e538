"""A spec as a RayJob of KubeRay.

It is checked against the schema of ray-project/kuberay: ray-operator/config/crd/bases/ray.io_rayjobs.yaml (v1.7.0), and
against the rules beyond the schema in ray-operator/controllers/ray/utils/validation.go.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.launch.kubernetes.schemas import validate
from holdfast.pipelines.backends.ray.emit import SPEC, STOP_SECONDS
from holdfast.pipelines.backends.ray.rayjob import rayjob, rayjob_text
from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec import SpecError, load_spec, parse_spec

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("cluster-*.yaml"))
FITTING = (
    "cluster.image=registry.example/all:1",
    "cluster.resources={cpu: 16, memory: 64Gi}",
    "store=s3://bucket/prefix",
)


def made(example: Path, *overrides: str) -> dict[str, Any]:
    """The RayJob of an example that fits on such nodes."""
    return rayjob(
        RunRequest(
            load_spec(
                example,
                (*FITTING, "cluster.job=pytorchjob", "cluster.scheduler=default", "cluster.queue=null", *overrides),
            )
        )
    )


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of the head and of the nodes."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_ray_job_whose_pods_are_restricted(example: Path) -> None:
    job = made(example)
    for template in pods(job):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        names = [next(iter(source.values()))["name"] for source in container["envFrom"]]
        assert names == ["holdfast-settings", "holdfast-secrets"]
        assert "command" not in container, "KubeRay writes it"
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_the_schema(example: Path) -> None:
    validate(made(example))


def test_the_job_name_derives_from_the_request_and_is_reproducible() -> None:
    spec = load_spec(EXAMPLES[0], (*FITTING, "cluster.scheduler=default", "cluster.queue=null"))
    assert rayjob_text(spec) == rayjob_text(spec)
    job = rayjob(RunRequest(spec, run_id="0123456789abcdef"))
    assert job["metadata"]["name"].startswith("holdfast-0123456789abcdef-")
    assert len(job["metadata"]["name"]) <= 47, "MaxRayJobNameLength"
    assert job["spec"]["jobId"] == f"{job['metadata']['name']}-1"
    assert f"--job={job['spec']['jobId']}" in job["spec"]["entrypoint"]


def test_the_steps_read_the_very_spec_and_have_time_to_save() -> None:
    job = made(EXAMPLES[0], "checkpoint.grace_seconds=300")
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert parse_spec(variables[SPEC]).checkpoint.grace_seconds == 300
    assert int(variables[STOP_SECONDS]) > 300


def test_a_rayjob_for_kueue_starts_suspended() -> None:
    example = EXAMPLES[0]
    job = rayjob(
        RunRequest(
            load_spec(example, (*FITTING, "cluster.job=pytorchjob", "cluster.scheduler=kueue", "cluster.queue=team"))
        )
    )
    assert job["spec"]["suspend"] is True
    assert job["spec"]["shutdownAfterJobFinishes"] is True, "else KubeRay refuses suspend"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_its_image_is_the_one_that_is_built_for_ray_unless_the_spec_names_another() -> None:
    for overrides, image in (((), "registry.example/all:1"), (("cluster.image=null",), "holdfast-ray-nvidia:")):
        for template in pods(made(EXAMPLES[0], "cluster.accelerator=nvidia", *overrides)):
            (container,) = template["spec"]["containers"]
            assert container["image"].startswith(image)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.steps.preprocess.memory=128Gi", "is more than a node has"),
        ("cluster.steps.evaluate.cpu=32", "is more than a node has"),
    ],
)
def test_a_request_that_a_rayjob_cluster_does_not_support_is_refused(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made(EXAMPLES[0], override)
