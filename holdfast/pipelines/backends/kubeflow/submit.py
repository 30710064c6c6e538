"""A run of the pipeline on the KFP server, once for each identity.

Submitting the same request again, concurrently or after a lost connection, returns the existing run: an unfinished one,
or one that succeeded on the same data. KFP does not enforce unique names. Of runs that are created at the same moment
the oldest stays, and the rest is ended before it does any work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import kfp_server_api

from holdfast.pipelines.backends.kubeflow.compile import order_text, pipeline_digest
from holdfast.pipelines.backends.kubeflow.connection import KubeflowRefusedError, Server
from holdfast.pipelines.backends.kubeflow.upload import Uploaded, in_namespace, named, upload_text
from holdfast.pipelines.backends.request import RunRequest

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
        kept = find() or run
        run, created = kept, kept.run_id == run.run_id
    return Submitted(run.run_id, name, run.state or "PENDING", server.link("runs", run.run_id), created, version)


def _the_one(server: Server, name: str, *, finished: bool) -> Any | None:
    """The valid run called `name`: the oldest unfinished one; the newer unfinished ones are ended.

    Otherwise, if `finished` ones count, the newest one that succeeded.
    """
    found = [
        run
        for run in server.every(server.runs.run_service_list_runs, "runs", filter=named(name), **in_namespace(server))
        if run.display_name == name and run.storage_state != "ARCHIVED"
    ]
    found.sort(key=lambda run: (run.created_at, run.run_id))
    running = [run for run in found if (run.state or UNFINISHED[0]) in UNFINISHED]
    for twin in running[1:]:
        end(server, twin.run_id)
    succeeded = [run for run in found if run.state == SUCCEEDED] if finished else []
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
        found = server.every(
            experiments.experiment_service_list_experiments, "experiments", filter=named(name), **in_namespace(server)
        )
        return next((one for one in found if one.display_name == name), None)

    body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=server.namespace or None)
    made, _ = server.ensure(
        find, lambda **timeout: experiments.experiment_service_create_experiment(experiment=body, **timeout)
    )
    return str(made.experiment_id)
