"""A run of the pipeline on the KFP server, once for each identity.

Submitting the same request again, concurrently or after a lost connection, returns the existing run: an unfinished one,
or one that succeeded on the same data. KFP does not enforce unique names. Of runs that are created at the same moment
the oldest stays, and the rest is ended before it does any work.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kfp_server_api

from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_digest, pipeline_text
from holdfast.pipelines.backends.kubeflow.connection import KubeflowRefusedError, Server
from holdfast.pipelines.backends.request import RunRequest
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import Spec
from holdfast.tracking.artifacts import git_commit

UNFINISHED = ("RUNTIME_STATE_UNSPECIFIED", "PENDING", "RUNNING", "PAUSED")
SUCCEEDED = "SUCCEEDED"
# The server counts creation in whole seconds. After this time, every run that it counts as older than ours is visible.
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Submitted:
    """The run of a request on the server."""

    kfp_run_id: str
    name: str
    state: str
    link: str
    created: bool
    version: Uploaded


def submit(server: Server, wanted: RunRequest) -> Submitted:
    """The run of `wanted` on the server; created unless one is unfinished or has succeeded."""
    text = order_text(wanted)
    version = upload_text(server, wanted.title, text)
    name = wanted.name(pipeline_digest(text))
    body = kfp_server_api.V2beta1Run(
        experiment_id=experiment(server, wanted.spec.experiment),
        display_name=name,
        description=f"Holdfast {'sweep' if wanted.trials else 'run'} {wanted.run_id}" if wanted.run_id else "Holdfast",
        pipeline_version_reference=version.reference,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=wanted.escaped_parameters()),
        service_account=wanted.service_account or None,
    )

    def find() -> Any | None:
        # KFP reports success for a sweep with a failed trial. So a sweep is created again and reads back finished work.
        return _the_one(server, name, finished=bool(wanted.run_id) and not wanted.trials)

    run, created = server.ensure(find, lambda **timeout: server.runs.run_service_create_run(run=body, **timeout))
    if created and not server.dry:
        time.sleep(SETTLE_SECONDS)
        oldest = find() or run
        run, created = oldest, oldest.run_id == run.run_id
    return Submitted(run.run_id, name, run.state or "PENDING", server.link("runs", run.run_id), created, version)


def _the_one(server: Server, name: str, *, finished: bool) -> Any | None:
    """The valid run called `name`: the oldest unfinished one; the newer unfinished ones are ended.

    Otherwise, if `finished` ones count, the newest one that succeeded.
    """
    runs = [
        run
        for run in server.every(server.runs.run_service_list_runs, "runs", filter=named(name), **in_namespace(server))
        if run.display_name == name and run.storage_state != "ARCHIVED"
    ]
    runs.sort(key=lambda run: (run.created_at, run.run_id))
    running = [run for run in runs if (run.state or UNFINISHED[0]) in UNFINISHED]
    for twin in running[1:]:
        end(server, twin.run_id)
    succeeded = [run for run in runs if run.state == SUCCEEDED] if finished else []
    return next(iter(running), None) or next(reversed(succeeded), None)


def end(server: Server, kfp_run_id: str) -> bool:
    """End a run; False if it had already ended."""
    try:
        server.ask(server.runs.run_service_terminate_run, run_id=kfp_run_id)
    except KubeflowRefusedError:
        if (server.ask(server.runs.run_service_get_run, run_id=kfp_run_id).state or "") in UNFINISHED:
            raise
        return False
    return True


def experiment(server: Server, name: str) -> str:
    """The id of the experiment called `name`; created if it does not exist."""
    experiments = server.experiments

    def find() -> Any | None:
        entries = server.every(
            experiments.experiment_service_list_experiments, "experiments", filter=named(name), **in_namespace(server)
        )
        return next((candidate for candidate in entries if candidate.display_name == name), None)

    body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=server.namespace or None)
    stored, _ = server.ensure(
        find, lambda **timeout: experiments.experiment_service_create_experiment(experiment=body, **timeout)
    )
    return str(stored.experiment_id)


# A compiled pipeline on the KFP server: one pipeline for each name, one version for each content.
#
# The same content is uploaded once, for any number of clients and calls. The next call completes an interrupted upload.

EQUALS, CONTAINS = "EQUALS", "IS_SUBSTRING"
VERSION_DIGITS, COMMIT_DIGITS = 16, 8
DESCRIPTION = "Raw text to a registered language model. Uploaded by Holdfast."


@dataclass(frozen=True)
class Uploaded:
    """A version of a pipeline on the server."""

    pipeline_id: str
    version_id: str
    version: str  # its name, which ends with a digest of the content
    created: bool

    @property
    def reference(self) -> kfp_server_api.V2beta1PipelineVersionReference:
        """The reference to the version for runs and schedules."""
        return kfp_server_api.V2beta1PipelineVersionReference(
            pipeline_id=self.pipeline_id, pipeline_version_id=self.version_id
        )


def version_name(text: str) -> str:
    """The name of a version with this content that is uploaded today: the UTC date, the commit and a digest of the
    content.

    Example: `2026-11-25-5e9577d0-0f3d9c2a7b115e44`. KFP may use it as a Kubernetes name.
    """
    commit, dirty, _ = (git_commit() or "").partition("-dirty")
    parts = (f"{datetime.now(UTC):%Y-%m-%d}", f"{commit[:COMMIT_DIGITS]}{dirty}", content_digest(text))
    return "-".join(part for part in parts if part)


def content_digest(text: str) -> str:
    """A digest of a compiled pipeline."""
    return hashlib.sha256(text.encode()).hexdigest()[:VERSION_DIGITS]


def named(name: str, operation: str = EQUALS) -> str:
    """An API filter: objects whose display name is, or contains, `name`."""
    return json.dumps({"predicates": [{"operation": operation, "key": "display_name", "stringValue": name}]})


def in_namespace(server: Server) -> dict[str, Any]:
    """The keyword that limits listings to a user's namespace; empty where Kubeflow has one user."""
    return {"namespace": server.namespace} if server.namespace else {}


def upload(server: Server, spec: Spec, image: str | None = None, scheduled: bool = False) -> Uploaded:
    """Upload the pipeline of `spec` as it compiles now, unless the server has it."""
    return upload_text(server, spec.name, pipeline_text(spec, image, scheduled))


def upload_text(server: Server, pipeline: str, text: str) -> Uploaded:
    """Upload this content as a version of the pipeline `pipeline`, unless the server has it."""
    pipeline_id = _pipeline(server, pipeline)
    name, content = version_name(text), content_digest(text)

    def find() -> Any | None:
        versions = server.every(
            server.pipelines.pipeline_service_list_pipeline_versions,
            "pipeline_versions",
            pipeline_id=pipeline_id,
            filter=named(content, CONTAINS),
        )
        return min(
            (version for version in versions if str(version.display_name).endswith(f"-{content}")),
            key=lambda version: (str(version.created_at), version.pipeline_version_id),
            default=None,
        )

    with temporary_folder("upload") as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(text, encoding="utf-8")
        stored, created = server.ensure(
            find,
            lambda **timeout: server.pipeline_uploads.upload_pipeline_version(
                str(file), name=name, pipelineid=pipeline_id, description=DESCRIPTION, **timeout
            ),
        )
    return Uploaded(pipeline_id, stored.pipeline_version_id, stored.display_name or name, created)


def _pipeline(server: Server, name: str) -> str:
    """The id of the pipeline called `name`; created without a version if it does not exist."""
    pipelines = server.pipelines

    def find() -> Any | None:
        entries = server.every(
            pipelines.pipeline_service_list_pipelines, "pipelines", filter=named(name), **in_namespace(server)
        )
        return min(
            (pipeline for pipeline in entries if pipeline.display_name == name),
            key=lambda pipeline: (str(pipeline.created_at), pipeline.pipeline_id),
            default=None,
        )

    body = kfp_server_api.V2beta1Pipeline(
        display_name=name, name=name, description=DESCRIPTION, namespace=server.namespace or None
    )
    stored, _ = server.ensure(
        find, lambda **timeout: pipelines.pipeline_service_create_pipeline(pipeline=body, **timeout)
    )
    return str(stored.pipeline_id)
