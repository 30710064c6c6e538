"""One launcher for each run, whichever machines they are on: a Lease that its holder renews.

Promises that a second launcher waits, that a dead one is replaced at once when its pod is known to be gone and after
the lease's duration otherwise, and that a replaced one learns it. Compares no clocks of two machines: what counts is
whether the lease changes.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Self

from holdfast.components.launch.kubernetes.client import LEASES, PODS, Api, ConflictError, Object
from holdfast.components.spec.errors import ClusterUnreachableError, HoldfastError, PreemptedError

log = logging.getLogger("holdfast.launch")

DURATION = 30.0
RENEW = 5.0
POLL = 1.0


class RunLease:
    """Held while in the `with` block. `replaced` is set when another launcher took it away."""

    def __init__(self, api: Api, run_id: str, pod: str | None, owners: Sequence[Object], duration: float = DURATION):
        """`pod` is this launcher's own; the container that was there before in the same pod is dead."""
        self.replaced = threading.Event()
        self._api, self._run_id, self._owners, self._duration = api, run_id, list(owners), duration
        self._name = f"holdfast-{run_id}"
        self._me = f"pod/{pod}" if pod else f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._lease: Object = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=2 * RENEW)
        if not self.replaced.is_set() and not self._thread.is_alive():
            try:
                self._api.delete(LEASES, self._name, self._lease["metadata"]["uid"])
            except HoldfastError as error:
                log.warning("the lease of run %s was not given back, it runs out by itself: %s", self._run_id, error)

    def _acquire(self) -> None:
        seen, since, told = "", time.monotonic(), False
        while True:
            found = self._api.get(LEASES, self._name)
            if found is not None:
                version = found["metadata"]["resourceVersion"]
                if version != seen:
                    seen, since = version, time.monotonic()
                holder = found["spec"].get("holderIdentity") or ""
                if not (time.monotonic() - since > self._duration or self._is_free(holder)):
                    if not told:
                        log.info("run %s is followed by the launcher %s: waiting for it", self._run_id, holder)
                    told = True
                    time.sleep(POLL)
                    continue
            try:
                self._lease = self._write(found)
                return
            except ConflictError:  # another was quicker, or this very request was and its reply was lost
                continue

    def _is_free(self, holder: str) -> bool:
        if holder in ("", self._me):
            return True
        if not holder.startswith("pod/"):
            return False
        pod = self._api.get(PODS, holder.removeprefix("pod/"))
        return pod is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")

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
                try:
                    self._lease = self._write(self._lease)
                except ConflictError:
                    found = self._api.get(LEASES, self._name)
                    if found is not None and found["spec"].get("holderIdentity") != self._me:
                        log.error("run %s has another launcher now: %s", self._run_id, found["spec"]["holderIdentity"])
                        self.replaced.set()
                        return
                    self._lease = self._write(found)
            except ClusterUnreachableError as error:
                log.warning("the lease of run %s cannot be renewed for now: %s", self._run_id, error)
            except HoldfastError as error:
                log.warning("the lease of run %s was not renewed: %s", self._run_id, error)

    def check(self) -> None:
        """Raises PreemptedError when another launcher follows the run now: the same command waits for that one."""
        if self.replaced.is_set():
            raise PreemptedError(f"run {self._run_id} has another launcher now; this one leaves the job to it")
