"""Lease that its holder renews: one launcher for each run, across machines.

- A second launcher waits.
- A dead launcher is replaced immediately if its pod is known to be gone, else after the lease's duration.
- A launcher that was replaced, or whose lease was deleted, notices it.

Clocks of two machines are never compared: only a change of the lease counts.
"""

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Self

from holdfast.launch.kubernetes.api_errors import ConflictError
from holdfast.launch.kubernetes.client import LEASES, PODS, Api, Object
from holdfast.launch.kubernetes.owner import OwnPod
from holdfast.spec.errors import ClusterUnreachableError, HoldfastError, MissingError, PreemptedError

log = logging.getLogger("holdfast.launch")

DURATION = 30.0
RENEW = 5.0
POLL = 1.0
GIVE_BACK_SECONDS = 10.0  # for a renewal in flight when the lease is given back


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
