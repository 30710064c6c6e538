"""The cluster of a run, and checks of what it serves: API server, custom resources, settings, claims, controller."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.configuration import NoClusterError
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec
from holdfast.spec.cluster import SECRETS, SETTINGS
from holdfast.spec.errors import AccessDeniedError, ExitCode, HoldfastError

# Retry policy of the engine below Kubeflow Pipelines, from the configuration of Argo's workflow controller.
#
# KFP's compiler gives a task with `set_retry` a limit and a backoff, and no policy: the controller's
# `workflowDefaults.spec.templateDefaults` fills that in, and without one Argo takes OnFailure. Sources:
# docs/retries.md.

CONFIG_MAP = "workflow-controller-configmap"  # in the namespace of the controller
ENGINE_PLACE = "workflowDefaults.spec.templateDefaults.retryStrategy"
DEFAULT_POLICY = "OnFailure"


@dataclass(frozen=True)
class EngineRetries:
    """The kinds of failures after which the engine retries a step."""

    policy: str
    failures: bool  # a step that ended with an exit code, was evicted, or ran out of memory
    errors: bool  # a pod that was deleted, as with its node, or that the controller could not create

    @property
    def text(self) -> str:
        """The policy in one sentence, with its consequence."""
        missing = [
            failure
            for retried, failure in (
                (self.failures, "a step that failed, was evicted or ran out of memory"),
                (self.errors, "one whose pod was deleted, as with its node"),
            )
            if not retried
        ]
        if not missing:
            return f"retryPolicy {self.policy}: failed steps and lost pods are tried again"
        return (
            f"retryPolicy {self.policy}: the engine does not try again {' or '.join(missing)}. What a step can try "
            "again in its own pod it does (cluster.retries); for the rest set retryPolicy: Always in "
            f"{ENGINE_PLACE} of the ConfigMap {CONFIG_MAP}, or submit the same again, which resumes where it was"
        )


def engine_retries(data: Mapping[str, str]) -> EngineRetries:
    """The retry policy of a KFP task under `data`, the controller's ConfigMap. Raises ValueError for invalid YAML."""
    policy = _policy(data)
    return EngineRetries(policy, policy in ("Always", "OnFailure"), policy in ("Always", "OnError"))


def _policy(data: Mapping[str, str]) -> str:
    try:
        config = yaml.safe_load(data.get("config") or "") or {}  # the older form: everything under one key
        defaults = yaml.safe_load(data.get("workflowDefaults") or "") or _under(config, "workflowDefaults")
    except yaml.YAMLError as error:
        raise ValueError(f"{CONFIG_MAP}: is no YAML: {error}") from error
    strategy = _under(_under(_under(defaults, "spec"), "templateDefaults"), "retryStrategy")
    if policy := strategy.get("retryPolicy"):
        return str(policy)
    return "Always" if strategy.get("expression") else DEFAULT_POLICY


def _under(node: Any, key: str) -> dict[str, Any]:
    value = node.get(key) if isinstance(node, dict) else None
    return value if isinstance(value, dict) else {}


# The accounts of steps: those of manifests/base, and KFP's in a profile and without profiles.
LAUNCHERS = ("holdfast-launcher", "default-editor", "pipeline-runner")
RANK_ACCOUNT = "holdfast-train"
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


# Check that the API server responds and accepts the credentials.

REACH_CHECK = "api server"
PATIENCE = 3.0  # seconds; a person waits for the result


def reach(namespace: str | None) -> tuple[Finding, Api | None]:
    """The finding, and the client if the server responds."""
    try:
        api = Api.of_this_process(namespace, patience=PATIENCE)
    except NoClusterError as error:
        remedy = "set KUBECONFIG, or run this in a pod; then everything else is checked too"
        return Finding(REACH_CHECK, "warn", str(error), remedy), None
    try:
        version = api.read("/version") or {}
    except AccessDeniedError as error:
        remedy = "renew your credentials: kubectl auth whoami"
        return Finding(REACH_CHECK, "fail", f"{api.host} refuses you: {error}", remedy, error.exit_code), None
    except HoldfastError as error:
        remedy = "check the address: kubectl cluster-info"
        return Finding(REACH_CHECK, "fail", f"{api.host} cannot be reached: {error}", remedy, error.exit_code), None
    return Finding(REACH_CHECK, "ok", f"{api.host} answers, version {version.get('gitVersion', 'unknown')}"), api


# Check that the custom resources that Holdfast may use are served at its version.

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
        "workflows.argoproj.io",
        "v1alpha1",
        "Argo Workflows",
        "install Kubeflow Pipelines, which brings it, or Argo Workflows itself",
    ),
    CustomResource("trainjobs.trainer.kubeflow.org", "v1alpha1", "Kubeflow Trainer 2", "install it", job="trainjob"),
    CustomResource("jobs.batch.volcano.sh", "v1alpha1", "Volcano", "install Volcano", job="volcano"),
    CustomResource(VOLCANO_QUEUES, "v1beta1", "Volcano", "install Volcano", scheduler="volcano"),
    CustomResource(KUEUE_QUEUES, "v1beta2", "Kueue", "install Kueue, or a newer one", scheduler="kueue"),
)


def check_custom_resources(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each resource that the spec needs. Served ones are recorded for the following checks."""
    for resource in CUSTOM_RESOURCES:
        if not (cluster.everything or resource.needed(cluster)):
            continue
        reply = cluster.api.read(f"/apis/{resource.group}/{resource.version}")
        if reply and any(entry["name"] == resource.plural for entry in reply["resources"]):
            cluster.served.add(resource.name)
            yield Finding(resource.name, "ok", f"{resource.what} serves {resource.group}/{resource.version}")
            continue
        group = cluster.api.read(f"/apis/{resource.group}")
        served_versions = [version["version"] for version in group["versions"]] if group else []
        message = f"{resource.what}: {resource.group}/{resource.version} is not served"
        if resource.version in served_versions:
            message = f"{resource.what}: {resource.group}/{resource.version} has no {resource.plural}"
        elif served_versions:
            message += f" (only {', '.join(served_versions)})"
        yield Finding(resource.name, "fail" if resource.needed(cluster) else "warn", message, resource.remedy)


# Check that the ConfigMap and the Secrets of a run exist and have the required keys. No value is ever printed.

SETTINGS_CHECK, SECRET_NAME = "settings", "secrets"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def check_settings(cluster: Cluster) -> Iterator[Finding]:
    """Check the ConfigMap, then each Secret."""
    spec = cluster.spec
    settings = spec.cluster.settings if spec else SETTINGS
    environment = spec.cluster.environment if spec else {}
    config_map = cluster.api.read(f"{_path(cluster)}/configmaps/{settings}") if settings else None
    values: dict[str, Any] = {**((config_map or {}).get("data") or {}), **environment}
    yield _settings(cluster, settings, config_map is not None, values)
    secret_names = spec.cluster.secrets if spec else (SECRETS,)
    secrets = {name: cluster.api.read(f"{_path(cluster)}/secrets/{name}") for name in secret_names}
    for name, secret in secrets.items():
        if secret is None and name != SECRETS:
            remedy = f"kubectl create secret generic {name} -n {cluster.namespace} --from-env-file=FILE"
            yield Finding(SECRET_NAME, "fail", f"namespace {cluster.namespace} has no Secret {name!r}", remedy)
    keys = {key for secret in secrets.values() if secret for key in secret.get("data") or {}}
    missing = [key for key in KEYS if key not in keys and key not in values]
    if missing:
        yield Finding(
            SECRET_NAME,
            "warn",
            f"{' and '.join(missing)} are in no Secret of {cluster.namespace}: pods need an identity of the cloud",
            f"kubectl create secret generic {SECRETS} -n {cluster.namespace} --from-env-file=secrets.env, or give the "
            "service accounts an identity (manifests/components/workload-identity)",
        )
    else:
        yield Finding(
            SECRET_NAME, "ok", f"the keys of S3 are in {', '.join(name for name in secret_names if secrets[name])}"
        )


def _settings(cluster: Cluster, name: str | None, there: bool, values: dict[str, Any]) -> Finding:
    spec = cluster.spec
    missing = [] if "HOLDFAST_STORE" in values or (spec and spec.store) else ["HOLDFAST_STORE"]
    missing += [] if "MLFLOW_TRACKING_URI" in values else ["MLFLOW_TRACKING_URI"]
    source = f"ConfigMap {name}" if name else "cluster.environment"
    if missing:
        problem = f"lacks {' and '.join(missing)}" if there or not name else "is not there"
        remedy = (
            f"{source} of namespace {cluster.namespace}: copy manifests/overlays/profile/settings.yaml, and apply it"
        )
        message = f"{source} {problem}: steps would end with code {int(ExitCode.BAD_SPEC)} before they begin"
        return Finding(SETTINGS_CHECK, "fail", message, remedy)
    if not str(values["MLFLOW_TRACKING_URI"]).startswith(("http", "databricks", "postgresql", "mysql", "mssql")):
        remedy = f"write the address of a server into {source}, such as http://mlflow:5000"
        return Finding(SETTINGS_CHECK, "fail", f"MLFLOW_TRACKING_URI in {source} is no server", remedy)
    return Finding(SETTINGS_CHECK, "ok", f"{source} says where the store and MLflow are")


def _path(cluster: Cluster) -> str:
    return f"/api/v1/namespaces/{cluster.namespace}"


# Check that the volume claims of a spec exist, are bound, and can be mounted by all pods of a run concurrently.

CLAIMS_CHECK = "claims"


def check_claims(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each claim."""
    volumes = cluster.spec.cluster.volumes if cluster.spec else ()
    for name in dict.fromkeys(volume.claim for volume in volumes):
        claim = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims/{name}")
        command = f"kubectl describe -n {cluster.namespace} pvc {name}"
        if claim is None:
            message = f"namespace {cluster.namespace} has no PersistentVolumeClaim {name!r}"
            yield Finding(CLAIMS_CHECK, "fail", message, "make it, or name another in cluster.volumes")
            continue
        phase, modes = claim.get("status", {}).get("phase", "Pending"), claim["spec"].get("accessModes", [])
        if phase == "Lost":
            yield Finding(CLAIMS_CHECK, "fail", f"{name} is Lost", command)
        elif not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            message = f"{name} is {' and '.join(modes)}: pods on two nodes cannot mount it concurrently"
            yield Finding(CLAIMS_CHECK, "warn", message, "use a claim with ReadWriteMany, or S3")
        elif phase != "Bound":
            yield Finding(
                CLAIMS_CHECK, "warn", f"{name} is {phase}: it may wait for its first pod, or for ever", command
            )
        else:
            yield Finding(CLAIMS_CHECK, "ok", f"{name} is bound")


# Check the retries of the engine below Kubeflow Pipelines in its controller's configuration.
#
# Holdfast's Argo templates set their retries explicitly and use no default of the controller.

CONTROLLER_CHECK = "controller"
PLACE = "kubeflow"


def check_controller(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each controller ConfigMap that exists."""
    for namespace in dict.fromkeys([PLACE, cluster.namespace]):
        settings = cluster.api.read(f"/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}")
        if settings is None:
            continue
        try:
            retries = engine_retries(settings.get("data") or {})
        except ValueError as error:
            yield Finding(
                CONTROLLER_CHECK, "warn", f"{namespace}: {error}", f"kubectl edit -n {namespace} configmap {CONFIG_MAP}"
            )
            continue
        is_complete = retries.failures and retries.errors
        remedy = "" if is_complete else f"kubectl edit -n {namespace} configmap {CONFIG_MAP}: retryPolicy: Always"
        yield Finding(CONTROLLER_CHECK, "ok" if is_complete else "warn", f"{namespace}: {retries.text}", remedy)
