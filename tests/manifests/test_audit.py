"""The background audit: a CronJob that any overlay can list, patch and suspend."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.spec.errors import ExitCode
from holdfast.store import open_store
from tests.manifests.rendering import name_of, pods, render_with
from tests.manifests.validation import problems
from tests.pipelines.cli.test_runs import holdfast

GPU = """
apiVersion: batch/v1
kind: CronJob
metadata: {name: holdfast-audit}
spec:
  suspend: true
  jobTemplate:
    spec:
      template:
        spec:
          nodeSelector: {accelerator: h100}
          containers:
            - name: audit
              resources:
                limits: {nvidia.com/gpu: "1"}
"""


def cron_job(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = (document for document in objects if document["kind"] == "CronJob")
    return job


def test_the_audit_job_runs_alone_at_the_lowest_priority_without_retries(tmp_path: Path) -> None:
    objects = render_with("audit", "kind", tmp_path)
    job = cron_job(objects)
    assert problems(job) == []
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    assert job["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0, "a second one would hide the difference"
    ((_, _, pod),) = pods([job])
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("holdfast-train", False)
    assert f"PriorityClass/{pod['priorityClassName']}" in map(name_of, objects)
    lowest = min(
        (document for document in objects if document["kind"] == "PriorityClass"), key=lambda each: each["value"]
    )
    assert pod["priorityClassName"] == lowest["metadata"]["name"]


def test_an_overlay_gives_it_an_accelerator_an_image_and_suspends_it(tmp_path: Path) -> None:
    images = [{"name": "holdfast-train-cpu", "newName": "registry/holdfast-train-nvidia", "newTag": "0.1.0"}]
    job = cron_job(render_with("audit", "production", tmp_path, images=images, patches=[{"patch": GPU}]))
    assert problems(job) == []
    assert job["spec"]["suspend"] is True
    ((_, _, pod),) = pods([job])
    (container,) = pod["containers"]
    assert container["image"] == "registry/holdfast-train-nvidia:0.1.0"
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert pod["nodeSelector"] == {"accelerator": "h100"}


def test_its_command_is_one_and_ends_well_where_there_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, _, pod),) = pods([cron_job(render_with("audit", "kind", tmp_path))])
    program, *arguments = pod["containers"][0]["command"]
    monkeypatch.setenv("HOLDFAST_STORE", open_store(f"file://{tmp_path}/store").url)
    result = holdfast(*arguments)
    assert (program, result.exit_code) == ("holdfast", ExitCode.OK), result.output
    assert "0 computed again, 0 refused" in result.stdout
