"""A run of the pipeline on the KFP server, once for each identity.

Promises that submitting the same thing again, at the same time or after the connection was lost, gives the run that is
there: one that has not ended, or one that succeeded on the very same data. KFP has no names that only one run can take;
of runs that are made at the same moment the oldest stays, and the others are ended before they have done anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import kfp_server_api

from holdfast.components.spec import Spec, SpecError, dump_spec, run_id
from holdfast.components.spec.errors import HoldfastError, Problem
from holdfast.components.spec.identity import digest
from holdfast.pipelines.backends.kubeflow.connection import KubeflowRefusedError, Server
from holdfast.pipelines.backends.kubeflow.upload import Uploaded, in_namespace, named, upload

UNFINISHED = ("RUNTIME_STATE_UNSPECIFIED", "PENDING", "RUNNING", "PAUSED")
SUCCEEDED = "SUCCEEDED"
# The server counts creation in whole seconds: after this long, every run that it counts as older than ours can be seen.
SETTLE_SECONDS = 2.0
PLAN_DIGITS = 8


@dataclass(frozen=True)
class Plan:
    """What is to be run, and what it is called."""

    spec: Spec
    store: str = ""
    salt: str = ""
    run_id: str = ""  # empty when the sources cannot be read from here
    unread: str = ""  # why not
    service_account: str = ""

    def parameters(self) -> dict[str, Any]:
        """The parameters of the pipeline, as the UI shows them."""
        return {"spec": dump_spec(self.spec), "overrides": [], "store": self.store, "salt": self.salt}

    def name(self, version: str) -> str:
        """The name of the run: the family, the Holdfast run, and a digest of everything else that was asked for."""
        rest = digest([version, self.parameters(), self.service_account])[:PLAN_DIGITS]
        return " ".join(part for part in (self.spec.name, self.run_id, rest) if part)


@dataclass(frozen=True)
class Submitted:
    """The run of a plan on the server."""

    kfp_run_id: str
    name: str
    state: str
    link: str
    created: bool
    version: Uploaded


def plan(spec: Spec, *, store: str = "", salt: str = "", service_account: str = "") -> Plan:
    """Check that a cluster can run the spec, and identify the run if the sources can be read from here."""
    from holdfast.components.corpus import identify

    check_for_cluster(spec, store)
    found, unread = "", ""
    try:
        found = run_id(spec, identify(spec), salt)
    except (HoldfastError, OSError) as error:
        unread = str(error)
    return Plan(spec, store, salt, found, unread, service_account)


def check_for_cluster(spec: Spec, store: str = "") -> None:
    """Raise SpecError for what no pod could find: paths of this machine, and a store in a folder that is not shared."""
    mounts = [PurePosixPath(volume.path) for volume in spec.cluster.volumes]
    remedy = "put it into a bucket, or on a volume of cluster.volumes and write the absolute path there"
    paths = [("data.tokenizer.path", spec.data.tokenizer.path), ("model.init_from", spec.model.init_from)]
    paths += [(f"data.sources.{index}.uri", source.uri) for index, source in enumerate(spec.data.sources)]
    problems = []
    for name, path in paths:
        if path and (":" not in path or path.startswith("file:")) and not _mounted(path, mounts):
            problems.append(Problem(name, path, "is a path that no pod of the cluster has", remedy))
    root = store or spec.store or ""
    if root.startswith("file:") and not _mounted(root, mounts):
        problems.append(Problem("store", root, "is a folder that the pods of the cluster do not share", remedy))
    if problems:
        raise SpecError(problems, "spec, for a cluster")


def _mounted(path: str, mounts: Sequence[PurePosixPath]) -> bool:
    place = PurePosixPath(path.removeprefix("file://"))
    return any(place.is_relative_to(mount) for mount in mounts)


def submit(server: Server, wanted: Plan, image: str | None = None) -> Submitted:
    """The run of `wanted` on the server, made if there is none that still runs or has succeeded."""
    version = upload(server, wanted.spec, image)
    name = wanted.name(version.version)
    body = kfp_server_api.V2beta1Run(
        experiment_id=experiment(server, wanted.spec.experiment),
        display_name=name,
        description=f"Holdfast run {wanted.run_id}" if wanted.run_id else "Holdfast",
        pipeline_version_reference=version.reference,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=wanted.parameters()),
        service_account=wanted.service_account or None,
    )

    def find() -> Any | None:
        return _the_one(server, name, finished=bool(wanted.run_id))

    run, created = server.ensure(find, lambda **timeout: server.client.runs.run_service_create_run(run=body, **timeout))
    if created and not server.dry:
        time.sleep(SETTLE_SECONDS)
        kept = find() or run
        run, created = kept, kept.run_id == run.run_id
    return Submitted(run.run_id, name, run.state or "PENDING", server.link("runs", run.run_id), created, version)


def _the_one(server: Server, name: str, *, finished: bool) -> Any | None:
    """The run called `name` that stands: the oldest one that has not ended, and the others of those are ended here;
    else, if `finished` ones count, the newest one that succeeded."""
    found = [
        run
        for run in server.every(
            server.client.runs.run_service_list_runs, "runs", filter=named(name), **in_namespace(server)
        )
        if run.display_name == name and run.storage_state != "ARCHIVED"
    ]
    found.sort(key=lambda run: (run.created_at, run.run_id))
    running = [run for run in found if (run.state or UNFINISHED[0]) in UNFINISHED]
    for twin in running[1:]:
        end(server, twin.run_id)
    succeeded = [run for run in found if run.state == SUCCEEDED] if finished else []
    return next(iter(running), None) or next(reversed(succeeded), None)


def end(server: Server, kfp_run_id: str) -> bool:
    """End a run; False if it had ended before."""
    try:
        server.ask(server.client.runs.run_service_terminate_run, run_id=kfp_run_id)
    except KubeflowRefusedError:
        if (server.ask(server.client.runs.run_service_get_run, run_id=kfp_run_id).state or "") in UNFINISHED:
            raise
        return False
    return True


def experiment(server: Server, name: str) -> str:
    """The id of the experiment called `name`, made if there is none."""
    experiments = server.client.experiments

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
