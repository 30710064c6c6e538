"""Pipeline run of a launcher: found from its pod, and queried for whether it was ended.

A launcher's pod gets the same SIGTERM when a person ends the pipeline run and when a node is drained. Only the Workflow
(Argo's object, which a KFP run also is) shows which of the two it was.
"""

import logging
import os
from dataclasses import dataclass

from holdfast.launch.kubernetes.client import PODS, WORKFLOWS, Api, Object
from holdfast.runtime.node import POD_VARIABLE
from holdfast.spec.errors import HoldfastError, MissingError

log = logging.getLogger("holdfast.launch")

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
