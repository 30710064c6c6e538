"""Kubernetes launcher: one job object for each launch, created or adopted, and followed to its end.

A run has exactly one job, even if several launchers start it. An ending names the rank, the node and the reason. No pod
of a launch remains when the next launch starts. `Supervisor` owns the restart budget. Nodes that failed a health check
are labeled, for schedulers and later jobs.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from holdfast.launch.emitters import LAUNCH_LABEL, RUN_LABEL, has_key, key_secret, objects_for
from holdfast.launch.emitters.pod import FAILED, HEALTH_LABEL
from holdfast.launch.interface import GangExit, Job, changes_members
from holdfast.launch.kubernetes.api_errors import ConflictError
from holdfast.launch.kubernetes.client import NODES, SECRETS, Api, Object, Resource
from holdfast.launch.kubernetes.configuration import own_namespace
from holdfast.launch.kubernetes.follow import Follower
from holdfast.launch.kubernetes.kinds import KINDS, Kind
from holdfast.launch.kubernetes.lease import RunLease
from holdfast.launch.kubernetes.owner import Pipeline, find_own_pod, find_pipeline
from holdfast.runtime.node import NAMESPACE_VARIABLE, POD_VARIABLE
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import (
    AccessDeniedError,
    ClusterUnreachableError,
    ExitCode,
    HoldfastError,
    MissingError,
    Problem,
    SpecError,
)

log = logging.getLogger("holdfast.launch")

MAKING_TRIES = 10  # to create an object if the server calls its name taken and does not have it
MAKING_PAUSE = 1.0  # seconds between them
MANAGER = "holdfast-health"  # field manager of the label
FOUND_BY = "holdfast/health-found-by"  # the annotation
PATIENCE = 30.0  # seconds for each node, while the restart of the gang waits


class KubernetesLauncher:
    """Launcher that creates or adopts a Kubernetes job object. See `Launcher`."""

    def __init__(self, cluster: Cluster, api: Api | None = None, pod: str | None = None) -> None:
        """`api` reaches the namespace of the jobs (default: `cluster.namespace`, else the launcher's own). `pod`
        is the launcher's own pod (default: HOLDFAST_POD_NAME), through which its pipeline run is found in the
        pod's namespace."""
        self._api = api or Api.of_this_process(cluster.namespace)
        self._kind: Kind = KINDS[cluster.job]
        own = os.environ.get(NAMESPACE_VARIABLE) or (own_namespace() if api is None else api.namespace)
        home = self._api.within(own)
        self._pod = find_own_pod(home, pod or os.environ.get(POD_VARIABLE) or None)
        self._pipeline: Pipeline | None = find_pipeline(home, self._pod)
        self._lease: RunLease | None = None
        self._given_up: set[str] = set()  # uids of jobs whose pods do not go away
        self._stop_requested = threading.Event()
        self._changed = threading.Condition()

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. Waits for another launcher of the run in this cluster and namespace."""
        owner = self._owner()
        with RunLease(self._api, run_id, self._pod, [owner] if owner else []) as lease:
            self._lease = lease
            yield

    def adopt(self, run_id: str, launch: int) -> bool:
        """See Launcher. Deletes jobs of the run that no launcher follows any more."""
        live = False
        for job in self._jobs(run_id):
            metadata = job["metadata"]
            status = self._kind.status(job)
            number = int(metadata["labels"].get(LAUNCH_LABEL, 0))
            if metadata["uid"] in self._given_up:
                continue
            if metadata.get("deletionTimestamp") is None and status.state != "failed" and number == launch:
                log.info("adopting job %s of launch %d", metadata["name"], launch)
                live = True
                continue
            log.info("deleting job %s: no launcher follows it", metadata["name"])
            with Follower(self._api, self._kind, metadata["name"], run_id, number, self._changed) as follower:
                self._delete(metadata["name"], metadata["uid"], follower, grace=60.0)
        for resource in self._kind.helpers:  # of a launcher that died between two creations
            for obj in self._api.list(resource, f"{RUN_LABEL}={run_id}")[0]:
                if not live or obj["metadata"]["labels"].get(LAUNCH_LABEL) != str(launch):
                    self._api.delete(resource, obj["metadata"]["name"], obj["metadata"]["uid"])
        return live

    def run(self, job: Job) -> GangExit:
        """See Launcher. Raises the errors of the API server, and PreemptedError when another launcher took over."""
        if self._stop_requested.is_set() and self._api.get(self._kind.resource, job.name) is None:
            return GangExit(ExitCode.PREEMPTED, (), "stopped before the job was created")
        self._check()
        uid = self._create(job)
        with Follower(self._api, self._kind, job.name, job.run_id, job.launch, self._changed) as follower:
            try:
                pending_seconds, nodes = job.cluster.pending_timeout_minutes * 60, job.cluster.nodes
                replaceable = job.cluster.restarts.budget if changes_members(job.cluster) else 0
                ending = follower.follow(uid, pending_seconds, self._interrupted, nodes.min, replaceable)
            except (AccessDeniedError, MissingError):  # it cannot be followed: no job is better than an unattended one
                self._api.delete(self._kind.resource, job.name, uid)
                raise
            if ending is None:  # the launcher has to stop
                if self._pipeline is not None and not self._pipeline.was_ended():
                    follower.finish(0.0)
                    return GangExit(
                        ExitCode.PREEMPTED,
                        follower.tail,
                        f"only the launcher had to exit: job {job.name} continues, and the next launcher adopts it",
                    )
                log.info("ending job %s: its ranks save a checkpoint and leave", job.name)
                self._delete(job.name, uid, follower, job.grace_seconds)
                return self._stopped(follower)
            self._check()
            if ending.code == ExitCode.UNHEALTHY_NODE and job.cluster.health.on_failure == "label":
                label_unhealthy(self._api, job, ending)
            if ending.code != ExitCode.OK or not follower.status.finished:
                self._delete(job.name, uid, follower, job.grace_seconds)
            return ending

    def stop(self) -> None:
        """See Launcher. The job stays if only this launcher's pod has to go."""
        self._stop_requested.set()
        with self._changed:
            self._changed.notify_all()

    def _interrupted(self) -> bool:
        self._check()
        return self._stop_requested.is_set()

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _stopped(self, follower: Follower) -> GangExit:
        """The ending of a job after `stop`."""
        if self._pipeline is not None:
            return GangExit(ExitCode.CANCELLED, follower.tail, "the pipeline run was ended")
        symptoms = follower.symptoms()
        have_saved = bool(symptoms) and all(symptom.code == ExitCode.PREEMPTED for symptom in symptoms)
        return GangExit(
            ExitCode.PREEMPTED if have_saved else ExitCode.TERMINATED, follower.tail, "the launcher was stopped"
        )

    def _jobs(self, run_id: str) -> list[Object]:
        try:
            return self._api.list(self._kind.resource, f"{RUN_LABEL}={run_id}")[0]
        except MissingError as error:
            raise self._unknown(error) from error

    def _unknown(self, error: MissingError) -> MissingError:
        return MissingError(f"the cluster knows no {self._kind.resource}: {self._kind.remedy} ({error})")

    def _owner(self) -> Object | None:
        """The pipeline run, as owner of the created objects; None if it is in another namespace. The garbage collector
        treats an owner in another namespace as gone."""
        if self._pipeline is None or self._pipeline.api.namespace != self._api.namespace:
            return None
        return self._pipeline.reference

    def _create(self, job: Job) -> str:
        """Create the objects of the job, or find existing ones. Returns the uid of the job object."""
        owner = self._owner()
        resources = (*self._kind.helpers, self._kind.resource)
        created: Object = {}
        for resource, body in zip(resources, objects_for(job, owner), strict=True):
            created = self._made(resource, body, job)
        uid = str(created["metadata"]["uid"])
        if has_key(job):
            self._give_key(job, created, uid)
        return uid

    def _give_key(self, job: Job, made: Object, uid: str) -> None:
        """Create the Secret with the key of the launch, unless it exists: the pods wait for it. The job owns it, so it
        is deleted with the job, and no process needs the right to read or delete Secrets. If that fails, the job is
        deleted."""
        owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": job.name, "uid": uid}
        try:
            self._api.create(SECRETS, key_secret(job, owner))
        except ConflictError:  # an earlier try or launcher has created it
            return
        except HoldfastError:
            self._api.delete(self._kind.resource, job.name, uid)
            raise

    def _made(self, resource: Resource, body: Object, job: Job) -> Object:
        """An object of the job, created here or by an earlier try. Raises ClusterUnreachableError if the server
        repeatedly says both that the object exists and that it does not. Causes are a name that is being deleted, or a
        contended quota."""
        for _ in range(MAKING_TRIES):
            try:
                created = self._api.create(resource, body)
                log.info("created %s %s in %s", resource, job.name, self._api.namespace)
                return created
            except MissingError as error:
                raise self._unknown(error) from error
            except ConflictError as error:
                conflict = error
                existing = self._api.get(resource, job.name)
            if existing is None:  # gone in between
                time.sleep(MAKING_PAUSE)
                continue
            labels = existing["metadata"].get("labels", {})
            if (labels.get(RUN_LABEL), labels.get(LAUNCH_LABEL)) != (job.run_id, str(job.launch)):
                problem = Problem(
                    "cluster.namespace",
                    self._api.namespace,
                    f"has another {resource} called {job.name}",
                    "delete that one, or use another namespace",
                )
                raise SpecError([problem]) from conflict
            return existing
        raise ClusterUnreachableError(
            f"{resource} {job.name} in {self._api.namespace} could not be made in {MAKING_TRIES} tries: each was "
            f"refused as a conflict, and there was no such object ({conflict}); the same command tries it again"
        ) from conflict

    def _delete(self, name: str, uid: str, follower: Follower, grace: float) -> None:
        """Delete the job and wait until its pods are gone. Pods on a lost node stay: the store fences them off."""
        self._api.delete(self._kind.resource, name, uid)
        if not follower.wait_until_gone(grace + 45.0):
            self._given_up.add(uid)
            log.warning(
                "pods of job %s do not go away; going on, because the store takes nothing from them any more", name
            )
        for helper in self._kind.helpers:
            self._api.delete(helper, name)


def label_unhealthy(api: Api, job: Job, ending: GangExit) -> None:
    """Label the nodes that failed the health check which ended a launch. Server-side apply touches nothing else of a
    node. Never raises: a label that may not be set becomes a warning with the remedy."""
    patient = api.within(api.namespace, PATIENCE)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for name in sorted(ending.blamed_nodes):
        metadata = {
            "name": name,
            "labels": {HEALTH_LABEL: FAILED},
            "annotations": {FOUND_BY: f"{now} run {job.run_id} launch {job.launch}"},
        }
        try:
            patient.apply(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata}, MANAGER)
        except HoldfastError as error:
            log.warning(
                "node %s is not labelled %s=%s, and other runs may land there: %s; apply "
                "manifests/components/node-health, or set cluster.health.on_failure: nothing",
                name,
                HEALTH_LABEL,
                FAILED,
                error,
            )
        else:
            log.warning("node %s failed its health check and is labelled %s=%s", name, HEALTH_LABEL, FAILED)
