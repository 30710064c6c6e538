"""Lease that its holder renews: one launcher for each run, across machines.

- A second launcher waits.
- A dead launcher is replaced immediately if its pod is known to be gone, else after the lease's duration.
- A launcher that was replaced, or whose lease was deleted, notices it.

Clocks of two machines are never compared: only a change of the lease counts.

A launcher's pod also leads to its pipeline run. The pod gets the same SIGTERM when a person ends the run and when a
node is drained. Only the Workflow (Argo's object, which a KFP run also is) shows which of the two it was.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from holdfast.launch.kubernetes.api_errors import ConflictError
from holdfast.launch.kubernetes.client import LEASES, PODS, WORKFLOWS, Api, Object
from holdfast.runtime.node import POD_VARIABLE
from holdfast.spec.errors import ClusterUnreachableError, HoldfastError, MissingError, PreemptedError

log = logging.getLogger("holdfast.launch")

DURATION = 30.0
RENEW = 5.0
POLL = 1.0
GIVE_BACK_SECONDS = 10.0  # for a renewal in flight when the lease is given back
UID_VARIABLE = "HOLDFAST_POD_UID"  # set by the downward API
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"


@dataclass(frozen=True)
class Pipeline:
    """The Workflow that started this launcher."""

    api: Api
    name: str
    uid: str

    @property
    def reference(self) -> Object:
        """The owner reference for objects that are deleted with the Workflow. A launcher's pod may be deleted before
        it."""
        return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": self.name, "uid": self.uid}

    def was_ended(self) -> bool:
        """Whether the Workflow was ended. True if it cannot be read: a stopped job resumes from its checkpoint, but an
        unattended one costs money."""
        try:
            found = self.api.get(WORKFLOWS, self.name)
        except HoldfastError as error:
            log.warning("workflow %s cannot be read, so the job is stopped: %s", self.name, error)
            return True
        if found is None or found["metadata"]["uid"] != self.uid or found["metadata"].get("deletionTimestamp"):
            return True
        spec, phase = found.get("spec", {}), found.get("status", {}).get("phase", "")
        ended = phase in ("Succeeded", "Failed", "Error")
        # KFP ends a run by setting its deadline to zero seconds.
        return bool(spec.get("shutdown")) or spec.get("activeDeadlineSeconds") == 0 or ended


@dataclass(frozen=True)
class OwnPod:
    """The pod that a launcher runs in."""

    namespace: str
    name: str
    uid: str  # empty if no variable sets it and it cannot be read

    def __str__(self) -> str:
        return f"pod/{self.namespace}/{self.name}/{self.uid}"


def find_own_pod(api: Api, name: str | None) -> OwnPod | None:
    """The pod `name` in the namespace of `api`, with the uid from its environment, else from the server. None without a
    name."""
    if name is None:
        return None
    uid = os.environ.get(UID_VARIABLE, "") if name == os.environ.get(POD_VARIABLE) else ""
    try:
        own = None if uid else api.get(PODS, name)
    except HoldfastError as error:
        log.warning("pod %s cannot be read, so its lease does not say which one it is: %s", name, error)
        own = None
    return OwnPod(api.namespace, name, own["metadata"]["uid"] if own else uid)


def find_pipeline(api: Api, pod: OwnPod | None) -> Pipeline | None:
    """The pipeline of the launcher's pod, in the pod's namespace, that of `api`. None where a person runs the launcher,
    or where the pipeline cannot be read, which logs a warning."""
    if pod is None:
        return None
    try:
        own = api.get(PODS, pod.name)
        if own is None:
            return None
        metadata = own["metadata"]
        name = metadata.get("labels", {}).get(WORKFLOW_LABEL)
        for reference in metadata.get("ownerReferences") or []:
            if reference["kind"] == "Workflow":
                return Pipeline(api, reference["name"], reference["uid"])
        if name is None:
            return None
        workflow = api.get(WORKFLOWS, name)
        if workflow is None:
            raise MissingError(f"there is no workflow {name} in {api.namespace}")
        return Pipeline(api, name, workflow["metadata"]["uid"])
    except HoldfastError as error:
        log.warning("the job will belong to no workflow, and the launcher's end will stop it: %s", error)
        return None


def name_of(run_id: str) -> str:
    """The name of a run's lease."""
    return f"holdfast-{run_id}"


class HeldError(HoldfastError):
    """Another launcher holds the lease, and keeps it."""


class RunLease:
    """Lease that is held within the `with` block. `replaced` is set when another launcher has taken it."""

    def __init__(
        self,
        api: Api,
        run_id: str,
        pod: OwnPod | None,
        owners: Sequence[Object],
        duration: float = DURATION,
        patience: float = math.inf,
    ) -> None:
        """`pod` is this launcher's own: an earlier container in the same pod is dead. `duration` is in seconds.
        Entering raises HeldError after `patience` seconds."""
        self.replaced = threading.Event()
        self._api, self._run_id, self._owners, self._duration = api, run_id, list(owners), duration
        self._patience = patience
        self._name = name_of(run_id)
        self._me = str(pod) if pod else f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._lease: Object = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(GIVE_BACK_SECONDS)
        if not self.replaced.is_set() and not self._thread.is_alive():
            try:
                self._api.delete(LEASES, self._name, self._lease["metadata"]["uid"], background=True)
            except HoldfastError as error:
                log.warning("the lease of run %s was not given back, it runs out by itself: %s", self._run_id, error)

    def _acquire(self) -> None:
        start = since = time.monotonic()
        last_version, logged = "", False
        while True:
            lease = self._api.get(LEASES, self._name)
            if lease is not None:
                version = lease["metadata"]["resourceVersion"]
                if version != last_version:
                    last_version, since = version, time.monotonic()
                holder = lease["spec"].get("holderIdentity") or ""
                dying = "deletionTimestamp" in lease["metadata"]  # a launcher that took it would lose it
                if dying or not (time.monotonic() - since > self._duration or self._is_free(holder)):
                    if not logged:
                        awaited = "the lease that is being deleted" if dying else f"the launcher {holder}"
                        log.info("run %s: waiting for %s", self._run_id, awaited)
                    logged = True
                    if time.monotonic() - start > self._patience:
                        raise HeldError(f"{holder} has the lease {self._name}")
                    time.sleep(POLL)
                    continue
            try:
                self._lease = self._write(lease)
                return
            except ConflictError:  # another launcher was faster, or the reply to this request was lost
                continue

    def _is_free(self, holder: str) -> bool:
        if holder in ("", self._me):
            return True
        kind, *place = holder.split("/")
        if kind != "pod" or len(place) != 3:
            return False
        namespace, name, uid = place
        try:
            pod = self._api.within(namespace).get(PODS, name)
        except HoldfastError as error:  # no right in its namespace: time decides
            log.debug("whether %s lives cannot be read: %s", holder, error)
            return False
        if pod is None or (uid and pod["metadata"]["uid"] != uid):
            return True
        return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")

    def _write(self, found: Object | None) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata: Object = {"name": self._name, "labels": {"holdfast/run-id": self._run_id}}
        if self._owners:
            metadata["ownerReferences"] = self._owners
        if found is not None:
            metadata |= {key: found["metadata"][key] for key in ("uid", "resourceVersion")}
        spec = {"holderIdentity": self._me, "leaseDurationSeconds": max(1, int(self._duration)), "renewTime": now}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        return self._api.create(LEASES, lease) if found is None else self._api.replace(LEASES, lease)

    def _renew(self) -> None:
        while not self._closing.wait(min(RENEW, self._duration / 4)):
            try:
                if lost := self._renewed():
                    log.error("this launcher has lost the lease %s: %s", self._name, lost)
                    self.replaced.set()
                    return
            except ClusterUnreachableError as error:
                log.warning("the lease of run %s cannot be renewed for now: %s", self._run_id, error)
            except HoldfastError as error:
                log.warning("the lease of run %s was not renewed: %s", self._run_id, error)

    def _renewed(self) -> str:
        """Renew the lease. Returns why it is lost, else an empty string. Another launcher may hold a lost lease, so
        this one must not act."""
        try:
            self._lease = self._write(self._lease)
        except (ConflictError, MissingError):
            lease = self._api.get(LEASES, self._name)
            if lease is None:
                return "it was deleted"
            if (holder := lease["spec"].get("holderIdentity")) != self._me:
                return f"{holder} has it"
            self._lease = lease if "deletionTimestamp" in lease["metadata"] else self._write(lease)
        return "it is being deleted" if "deletionTimestamp" in self._lease["metadata"] else ""

    def check(self) -> None:
        """Raises PreemptedError if another launcher now follows the run: the same command waits for that launcher."""
        if self.replaced.is_set():
            raise PreemptedError(
                f"run {self._run_id} has another launcher now, or its lease is gone; this one leaves the job to others"
            )
