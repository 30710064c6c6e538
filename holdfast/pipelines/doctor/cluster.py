"""One cluster as the checks see it: the launcher's client, what a spec asks for, and what is served there."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launch.kubernetes.client import Api
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec

# The accounts that steps run as: those of manifests/base, and KFP's in a profile and without profiles.
LAUNCHERS = ("holdfast-launcher", "default-editor", "pipeline-runner")
SERVICE_ACCOUNTS = "manifests/base/service-accounts.yaml"


@dataclass
class Cluster:
    """A cluster, and a namespace of it."""

    api: Api
    spec: Spec | None
    launcher: str = LAUNCHERS[0]  # the service account of the train step
    kubeflow: bool = False  # whether its steps run as the account that KFP gives them
    everything: bool = False  # look also at what the spec does not need
    served: set[str] = field(default_factory=set)  # resources with their group, as kubectl writes them

    @property
    def namespace(self) -> str:
        """Where a run of the spec would be."""
        return self.api.namespace

    @property
    def job(self) -> str:
        """The kind of job that a run would be."""
        return self.spec.cluster.job if self.spec else "pytorchjob"

    @property
    def scheduler(self) -> str:
        """Who would place its pods; empty when no spec says so."""
        return self.spec.cluster.scheduler if self.spec else ""

    @property
    def queue(self) -> str | None:
        """The queue that the spec names."""
        return self.spec.cluster.queue if self.spec else None

    def absent(self, check: str, message: str, needed: bool, *, manifest: str, field: str) -> Finding:
        """An object that is not there. `manifest`: the file of this repository that makes it; empty for one that only
        the user knows. `field`: where the spec names another one."""
        make = f"kubectl apply -n {self.namespace} -f {manifest}" if manifest else "create it"
        return Finding(check, "fail" if needed else "warn", message, f"{make}, or name another one in {field}")
