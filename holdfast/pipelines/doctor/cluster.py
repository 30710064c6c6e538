"""A cluster for the checks: the launcher's client, the spec, and the served resources."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec

# The accounts of steps: those of manifests/base, and KFP's in a profile and without profiles.
LAUNCHERS = ("holdfast-launcher", "default-editor", "pipeline-runner")
SERVICE_ACCOUNTS = "manifests/base/service-accounts.yaml"


@dataclass
class Cluster:
    """A namespace of a cluster."""

    api: Api
    spec: Spec | None
    launcher: str = LAUNCHERS[0]  # the service account of the train step
    kubeflow: bool = False  # whether its steps run as KFP's account
    everything: bool = False  # also check what the spec does not need
    served: set[str] = field(default_factory=set)  # resources with their group, in kubectl's notation

    @property
    def namespace(self) -> str:
        """The namespace of a run of the spec."""
        return self.api.namespace

    @property
    def job(self) -> str:
        """The job kind of a run."""
        return self.spec.cluster.job if self.spec else "pytorchjob"

    @property
    def scheduler(self) -> str:
        """The scheduler of its pods; empty without a spec."""
        return self.spec.cluster.scheduler if self.spec else ""

    @property
    def queue(self) -> str | None:
        """The queue in the spec."""
        return self.spec.cluster.queue if self.spec else None

    def absent(self, check: str, message: str, needed: bool, *, manifest: str, field: str) -> Finding:
        """A finding for a missing object.

        `manifest`: the file of this repository that creates it; empty for one that only the user knows. `field`: the
        spec field that names another one.
        """
        make = f"kubectl apply -n {self.namespace} -f {manifest}" if manifest else "create it"
        return Finding(check, "fail" if needed else "warn", message, f"{make}, or name another one in {field}")
