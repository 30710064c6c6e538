"""Check that every node can pull the images of a run, and that the pull Secrets exist."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.launch.accelerators import training_image
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.runtime.step_runner import IMAGE

NAME = "images"
PULL_KINDS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each image and for each pull secret."""
    if cluster.spec is None:
        return
    wanted = cluster.spec.cluster
    for image in dict.fromkeys([IMAGE, wanted.image or training_image(wanted.accelerator)]):
        registry, _, rest = image.partition("/")
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        if not rest or not ("." in registry or ":" in registry or registry == "localhost"):
            message = f"{image} names no registry: only nodes on which it was loaded have it"
            remedy = (
                "push the images, and name them: --image for the steps, cluster.image for the ranks (docs/images.md)"
            )
            yield Finding(NAME, "warn", message, remedy)
        elif "@" not in image and tag in ("", "latest"):
            yield Finding(NAME, "warn", f"{image} changes under its name", "name a version, or better a digest")
        else:
            yield Finding(NAME, "ok", f"{image} names a registry and a version")
    for name in wanted.pull_secrets:
        found = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/secrets/{name}")
        if found is None or found.get("type") not in PULL_KINDS:
            about = "is not there" if found is None else f"is of type {found.get('type')}"
            remedy = f"kubectl create secret docker-registry {name} -n {cluster.namespace} --docker-server=..."
            yield Finding(NAME, "fail", f"pull secret {name} in {cluster.namespace} {about}", remedy)
