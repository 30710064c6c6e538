"""The DAG as a RayJob of KubeRay: a Ray cluster that lives as long as the run, and the job in it.

Like those of the training job, its pods meet the restricted Pod Security Standard, get the cluster's settings and
secrets, and have no API token. KubeRay sets the command of a pod, its probes and the container that waits for the head.
"""

import copy
import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from holdfast.launch.accelerators import ray_image
from holdfast.launch.choose import spares_refused
from holdfast.launch.emitters import training_job
from holdfast.launch.emitters.pod import kueue_labels, labels, pod_template, site_keys, sources, withheld
from holdfast.launch.exits import FILE_VARIABLE
from holdfast.launch.interface import Job
from holdfast.pipelines.backends.pods import resources_of
from holdfast.pipelines.backends.ray.emit import PREFIX, RayOrder
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.documents import as_yaml
from holdfast.pipelines.table import RETRY, edges_of, start_of, steps_from
from holdfast.runtime.environment import store_url
from holdfast.spec import Spec
from holdfast.spec.cluster import amount
from holdfast.spec.errors import Problem, SpecError
from holdfast.steps import STEPS

API_VERSION = "ray.io/v1"
HEAD_MEMORY = "4Gi"  # of Ray's processes on the head, in addition to the launcher
HEADER = "# Compiled by Holdfast from the spec `{name}`, for KubeRay.\n"


def rayjob_text(spec: Spec) -> str:
    """The RayJob of a spec as YAML for kubectl."""
    return HEADER.format(name=spec.name) + as_yaml(rayjob(RunRequest(spec)))


def rayjob(request: RunRequest) -> dict[str, Any]:
    """The RayJob of a request.

    Raises SpecError for what such a cluster cannot do. Its nodes are all alike, so every step must fit into one node,
    in one image that has Ray and all of Holdfast.
    """
    spec = request.spec
    if problems := _problems(spec):
        raise SpecError(problems, "target rayjob")
    order = RayOrder.of(request)
    name = f"{PREFIX}-{order.key}"
    image = spec.cluster.image or ray_image(spec.cluster.accelerator)
    job = training_job(spec, order.key, 1, request.store or store_url(spec))
    job = replace(job, name=name, cluster=job.cluster.model_copy(update={"image": image}))
    spec_of_job: dict[str, Any] = {
        "jobId": order.submission_id(1),
        "entrypoint": order.entrypoint(order.submission_id(1)),
        "runtimeEnvYAML": yaml.safe_dump(order.runtime_env(), sort_keys=True),
        "metadata": {key: value for key, value in order.metadata().items() if value},
        "submissionMode": "HTTPMode",  # the operator submits the job, without another pod
        # KubeRay knows no exit codes. Finished work is kept, and another cluster resumes it.
        "backoffLimit": RETRY.blind_tries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": int(spec.cluster.ttl_minutes * 60),
        "rayClusterSpec": _cluster(job, spec),
    }
    if spec.cluster.deadline_hours is not None:
        spec_of_job["activeDeadlineSeconds"] = max(1, int(spec.cluster.deadline_hours * 3600))
    if spec.cluster.scheduler == "kueue":
        spec_of_job["suspend"] = True  # Kueue starts it
    metadata: dict[str, Any] = {"name": name, "labels": {**_labels(job), **kueue_labels(job)}}
    if spec.cluster.annotations:
        metadata["annotations"] = dict(spec.cluster.annotations)
    if spec.cluster.namespace:
        metadata["namespace"] = spec.cluster.namespace
    return {"apiVersion": API_VERSION, "kind": "RayJob", "metadata": metadata, "spec": spec_of_job}


def _cluster(job: Job, spec: Spec) -> dict[str, Any]:
    nodes = spec.cluster.nodes
    worker = {
        "groupName": "node",
        "replicas": nodes.max,
        "minReplicas": nodes.min,
        "maxReplicas": nodes.max,
        "rayStartParams": {},
        "template": _template(job, "ray-worker"),
    }
    head = {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"}, "template": _head(job, spec)}  # noqa: S104 - of a pod
    fields = {"authOptions": {"mode": "token"}, "headGroupSpec": head, "workerGroupSpecs": [worker]}
    return {"rayVersion": ray_version(), **fields}


def _template(job: Job, container: str) -> dict[str, Any]:
    """The pod of a node: that of the training job, without the parts that KubeRay sets."""
    template = copy.deepcopy(pod_template(job, container, ()))
    template["metadata"]["labels"] = {**template["metadata"]["labels"], **_labels(job)}
    template["metadata"]["labels"].pop("holdfast/launch", None)
    pod = template["spec"]
    (main,) = pod["containers"]
    del main["command"], pod["restartPolicy"]
    # The pod is not for one launch: actors report how its nodes ended. Steps run in it too, so no secret is withheld.
    main["envFrom"] = sources(job.cluster)
    steps_need = [*withheld(), *site_keys(job.cluster)]
    main["env"] = [
        variable for variable in main["env"] if variable["name"] != FILE_VARIABLE and variable not in steps_need
    ]
    pod.pop("affinity", None)
    if job.cluster.nodes.max > 1:
        affinity_term = {"labelSelector": {"matchLabels": _labels(job)}, "topologyKey": "kubernetes.io/hostname"}
        preference = {"weight": 50, "podAffinityTerm": affinity_term}
        pod["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    return template


def _head(job: Job, spec: Spec) -> dict[str, Any]:
    """The pod of the head: the launcher, and Ray's own processes. It takes no accelerator."""
    steps = spec.cluster.steps
    template = _template(job, "ray-head")
    pod, step_pod = template["spec"], steps.train
    pod.pop("affinity", None)
    memory = math.ceil((amount(step_pod.memory) + amount(HEAD_MEMORY)) / 2**20)
    limits = {"memory": f"{memory}Mi", "ephemeral-storage": step_pod.ephemeral_storage}
    pod["containers"][0]["resources"] = {
        "requests": {"cpu": str(1 + math.ceil(amount(step_pod.cpu))), **limits},
        "limits": limits,
    }
    pod["containers"][0]["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    selector = {**steps.node_selector, **step_pod.node_selector}
    tolerations = [
        toleration.model_dump(exclude_none=True) for toleration in (*steps.tolerations, *step_pod.tolerations)
    ]
    for field, value in (("nodeSelector", selector), ("tolerations", tolerations)):
        pod.pop(field, None)
        if value:
            pod[field] = value
    return template


def _labels(job: Job) -> dict[str, str]:
    pod_labels = {key: value for key, value in labels(job).items() if key != "holdfast/launch"}
    return {**pod_labels, "app.kubernetes.io/component": "ray"}


def _problems(spec: Spec) -> list[Problem]:
    cluster = spec.cluster
    problems = spares_refused(cluster, "Ray")
    for step in steps_from(start_of(spec), edges_of(spec)):
        if STEPS[step].launches:
            continue
        resources = resources_of(STEPS[step], spec)
        for field in ("cpu", "memory"):
            requested, available = getattr(resources, field), getattr(cluster.resources, field)
            if amount(requested) > amount(available):
                remedy = f"raise cluster.resources.{field}, or ask for less here"
                message = f"is more than a node has ({available}), and Ray runs every step on one"
                problems.append(Problem(f"cluster.steps.{step}.{field}", requested, message, remedy))
    if cluster.scheduler == "volcano":
        problems.append(Problem("cluster.scheduler", "volcano", "is not tried with a RayJob", "use default or kueue"))
    return problems


def ray_version() -> str:
    """The version of the installed Ray, otherwise the one that this Holdfast supports."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "2.60.0"
