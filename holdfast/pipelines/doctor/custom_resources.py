"""Check that the custom resources that Holdfast may use are served at its version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding

TRAINING_OPERATOR = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/installation/"
PYTORCHJOBS = "pytorchjobs.kubeflow.org"
VOLCANO_QUEUES = "queues.scheduling.volcano.sh"
KUEUE_QUEUES = "localqueues.kueue.x-k8s.io"


@dataclass(frozen=True)
class CustomResource:
    """A custom resource that Holdfast may use."""

    name: str  # in kubectl's notation
    version: str
    what: str  # software that serves it
    remedy: str
    scheduler: str = ""  # cluster.scheduler that needs it
    job: str = ""  # cluster.job that needs it

    @property
    def group(self) -> str:
        """Its API group."""
        return self.name.partition(".")[2]

    @property
    def plural(self) -> str:
        """Its plural name in URL paths."""
        return self.name.partition(".")[0]

    def needed(self, cluster: Cluster) -> bool:
        """Whether a run requires it."""
        if self.job:
            return cluster.job == self.job
        return cluster.scheduler == self.scheduler if self.scheduler else True


CUSTOM_RESOURCES = (
    CustomResource(
        PYTORCHJOBS, "v1", "Kubeflow training operator", f"install it: {TRAINING_OPERATOR}", job="pytorchjob"
    ),
    CustomResource(
        "workflows.argoproj.io", "v1alpha1", "Argo Workflows",
        "install Kubeflow Pipelines, which brings it, or Argo Workflows itself",
    ),
    CustomResource("trainjobs.trainer.kubeflow.org", "v1alpha1", "Kubeflow Trainer 2", "install it", job="trainjob"),
    CustomResource("jobs.batch.volcano.sh", "v1alpha1", "Volcano", "install Volcano", job="volcano"),
    CustomResource(VOLCANO_QUEUES, "v1beta1", "Volcano", "install Volcano", scheduler="volcano"),
    CustomResource(KUEUE_QUEUES, "v1beta2", "Kueue", "install Kueue, or a newer one", scheduler="kueue"),
)  # fmt: skip


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each resource that the spec needs. Served ones are recorded for the following checks."""
    for wanted in CUSTOM_RESOURCES:
        if not (cluster.everything or wanted.needed(cluster)):
            continue
        listed = cluster.api.read(f"/apis/{wanted.group}/{wanted.version}")
        if listed and any(found["name"] == wanted.plural for found in listed["resources"]):
            cluster.served.add(wanted.name)
            yield Finding(wanted.name, "ok", f"{wanted.what} serves {wanted.group}/{wanted.version}")
            continue
        group = cluster.api.read(f"/apis/{wanted.group}")
        others = [version["version"] for version in group["versions"]] if group else []
        message = f"{wanted.what}: {wanted.group}/{wanted.version} is not served"
        if wanted.version in others:
            message = f"{wanted.what}: {wanted.group}/{wanted.version} has no {wanted.plural}"
        elif others:
            message += f" (only {', '.join(others)})"
        yield Finding(wanted.name, "fail" if wanted.needed(cluster) else "warn", message, wanted.remedy)
