"""One cluster as the checks see it: the launcher's client, what a spec asks for, and what is served there."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.components.launch.kubernetes.client import Api
from holdfast.components.spec import Spec
from holdfast.pipelines.doctor.findings import Finding

# The accounts that steps run as: those of manifests/base, and KFP's in a profile and without profiles.
LAUNCHERS = ("holdfast-launcher", "default-editor", "pipeline-runner")
MANIFESTS = "kubectl apply -k manifests/overlays/<yours>"


@dataclass
class Cluster:
    """A cluster, and a namespace of it."""

    api: Api
    spec: Spec | None
    launcher: str = LAUNCHERS[0]  # the service account of the train step
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

    def absent(self, check: str, message: str, needed: bool) -> Finding:
        """Something that the manifests bring, or that the spec names wrongly."""
        remedy = f"{MANIFESTS}, or name another in the spec" if needed else f"{MANIFESTS} --namespace {self.namespace}"
        return Finding(check, "fail" if needed else "warn", message, remedy)
