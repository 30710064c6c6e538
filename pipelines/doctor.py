"""`holdfast doctor`: looks at a cluster, the store and MLflow for what a run would miss, before a run misses it.

Promises one finding for each thing, with the command that mends it, and that it changes nothing but one small object of
its own in the store, which it removes. What it may not look at is a warning. Leaves the mending to a person.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holdfast.components.runtime.environment import store_url, tracking_uri
from holdfast.components.runtime.secrets import redact
from holdfast.components.spec import Spec
from holdfast.components.spec.errors import ExitCode, HoldfastError
from holdfast.components.store import ConflictError, open_store

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Outcome = Literal["ok", "warn", "fail"]
TIMEOUT = 10  # seconds for one answer
MANIFESTS = "kubectl apply -k manifests/overlays/<yours>"
_TRAINING = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/installation/"
_ARGO = "install Kubeflow Pipelines, which brings it, or Argo Workflows itself"
_SERVICE_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True)
class Api:
    """A custom resource that Holdfast may use."""

    group: str
    version: str
    resource: str
    what: str  # who serves it
    remedy: str
    scheduler: str = ""  # cluster.scheduler that needs it
    job: str = ""  # cluster.job that needs it
    always: bool = False

    @property
    def name(self) -> str:
        """As kubectl writes it."""
        return f"{self.resource}.{self.group}"


APIS = (
    Api(
        "kubeflow.org", "v1", "pytorchjobs", "Kubeflow training operator", f"install it: {_TRAINING}", job="pytorchjob"
    ),
    Api("argoproj.io", "v1alpha1", "workflows", "Argo Workflows", _ARGO, always=True),
    Api("trainer.kubeflow.org", "v1alpha1", "trainjobs", "Kubeflow Trainer 2", "install it", job="trainjob"),
    Api("batch.volcano.sh", "v1alpha1", "jobs", "Volcano", "install Volcano", job="volcano"),
    Api("scheduling.volcano.sh", "v1beta1", "queues", "Volcano", "install Volcano", scheduler="volcano"),
    Api("kueue.x-k8s.io", "v1beta2", "localqueues", "Kueue", "install Kueue, or a newer one", scheduler="kueue"),
)

# What the launcher does: (group, resource, verbs); the same words as manifests/base/rbac.yaml.
JOB_VERBS = ("create", "get", "list", "watch", "delete")
WATCH = ("get", "list", "watch")
LAUNCHER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "pods", WATCH),
    ("", "pods/log", ("get",)),
    ("coordination.k8s.io", "leases", ("create", "get", "update", "delete")),
    ("", "events", WATCH),
    ("argoproj.io", "workflows", ("get",)),
)


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what came of it."""

    check: str
    outcome: Outcome
    message: str
    remedy: str = ""
    code: ExitCode = field(default=ExitCode.NOT_FOUND)  # of the command, if this is the first failure


def examine(spec: Spec | None = None, namespace: str = "", store: str = "") -> Iterator[Finding]:
    """Look at everything, one finding after another. With a spec, what it asks for must be there; without one, what is
    optional is only mentioned. `namespace` and `store` default to the spec's, then to the surroundings'."""
    reached = False
    for finding in _cluster(spec, namespace):
        reached = reached or (finding.check == "api server" and finding.outcome == "ok")
        yield finding
    yield from _store(store or store_url(spec), reached)
    yield from _mlflow(tracking_uri(), reached)


def exit_code(findings: list[Finding]) -> ExitCode:
    """That of the first failure."""
    return next((finding.code for finding in findings if finding.outcome == "fail"), ExitCode.OK)


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """The findings for a script."""
    return [{**asdict(finding), "code": int(finding.code)} for finding in findings]


def _cluster(spec: Spec | None, namespace: str) -> Iterator[Finding]:
    from kubernetes import client, config
    from kubernetes.client.rest import ApiException
    from urllib3.exceptions import HTTPError

    configuration = client.Configuration()
    try:
        try:
            config.load_kube_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        remedy = "set KUBECONFIG, or run this in a pod; then everything else is checked too"
        yield Finding("api server", "warn", f"no cluster is configured ({error}): nothing of one was checked", remedy)
        return
    configuration.retries = 1
    with client.ApiClient(configuration) as api:
        try:
            version = client.VersionApi(api).get_code(_request_timeout=TIMEOUT)
        except ApiException as error:
            yield Finding(
                "api server", "fail", f"{configuration.host} answers {error.status} {error.reason}",
                "renew your credentials: kubectl auth whoami", ExitCode.ACCESS_DENIED,
            )  # fmt: skip
            return
        except HTTPError as error:
            yield Finding(
                "api server", "fail", f"{configuration.host} cannot be reached: {error}",
                "check the address: kubectl cluster-info", ExitCode.STORE_UNREACHABLE,
            )  # fmt: skip
            return
        yield Finding("api server", "ok", f"{configuration.host} answers, version {version.git_version}")
        namespace = namespace or (spec.cluster.namespace if spec else None) or _current_namespace(config) or "default"
        yield from _Cluster(api, spec, namespace).findings()


def _current_namespace(config: Any) -> str | None:
    """Where a pod runs, or what the current context of kubectl says."""
    try:
        with open(f"{_SERVICE_ACCOUNT_FOLDER}/namespace", encoding="utf-8") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        pass
    try:
        return str(config.list_kube_config_contexts()[1]["context"].get("namespace") or "") or None
    except (config.ConfigException, TypeError, KeyError):
        return None


class _Cluster:
    """The checks of one cluster and namespace."""

    def __init__(self, api: ApiClient, spec: Spec | None, namespace: str) -> None:
        self.api, self.spec, self.namespace = api, spec, namespace
        self.served: set[Api] = set()

    def findings(self) -> Iterator[Finding]:
        """Every check; one that may not look, or gets no answer, is a warning."""
        checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
            ("custom resources", self._apis),
            ("gang scheduling", self._gang),
            ("volcano actions", self._volcano_actions),
            ("volcano queue", self._volcano_queue),
            ("kueue queue", self._kueue_queue),
            ("permissions", self._permissions),
            ("service accounts", self._accounts),
            ("priority class", self._priority),
        ]
        from kubernetes.client.rest import ApiException
        from urllib3.exceptions import HTTPError

        for name, check in checks:
            try:
                yield from check()
            except ApiException as error:
                remedy = "ask an administrator to run this command" if error.status == 403 else "run this command again"
                yield Finding(name, "warn", f"could not look: {error.status} {error.reason}", remedy)
            except HTTPError as error:
                yield Finding(name, "warn", f"could not look: {error}", "run this command again")

    def _get(self, path: str, **query: str) -> Any | None:
        """What lies at a path of the API; None if there is nothing."""
        from kubernetes.client.rest import ApiException

        try:
            return self.api.call_api(
                path, "GET", query_params=list(query.items()), header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"], response_type="object", _return_http_data_only=True,
                _request_timeout=TIMEOUT,
            )  # fmt: skip
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _needs(self, api: Api) -> bool:
        """Whether a run cannot do without it."""
        if api.always:
            return True
        if self.spec is None:
            return api.job == "pytorchjob"
        cluster = self.spec.cluster
        return self._job == api.job if api.job else cluster.scheduler == api.scheduler

    @property
    def _job(self) -> str:
        return str(getattr(self.spec.cluster, "job", "pytorchjob")) if self.spec else "pytorchjob"

    @property
    def _scheduler(self) -> str:
        return self.spec.cluster.scheduler if self.spec else ""

    def _serves(self, resource: str) -> bool:
        return any(api.resource == resource for api in self.served)

    def _apis(self) -> Iterator[Finding]:
        for api in APIS:
            listed = self._get(f"/apis/{api.group}/{api.version}")
            if listed and any(found["name"] == api.resource for found in listed["resources"]):
                self.served.add(api)
                yield Finding(api.name, "ok", f"{api.what} serves {api.group}/{api.version}")
                continue
            group = self._get(f"/apis/{api.group}")
            others = [version["version"] for version in group["versions"]] if group else []
            message = f"{api.what}: {api.group}/{api.version} is not served"
            if others:
                message += f" (only {', '.join(others)})"
            yield Finding(api.name, "fail" if self._needs(api) else "warn", message, api.remedy)

    def _gang(self) -> Iterator[Finding]:
        if not self._serves("pytorchjobs"):
            return
        needed = self._scheduler == "volcano" and self._job == "pytorchjob"
        found = self._get("/apis/apps/v1/deployments", labelSelector="control-plane=kubeflow-training-operator")
        if not found or not found["items"]:
            yield Finding(
                "gang scheduling", "warn", "no deployment carries control-plane=kubeflow-training-operator",
                f"install the training operator: {_TRAINING}",
            )  # fmt: skip
            return
        operator = found["items"][0]
        container = operator["spec"]["template"]["spec"]["containers"][0]
        where = f"-n {operator['metadata']['namespace']} deployment/{operator['metadata']['name']}"
        words = " ".join([*container.get("command", []), *container.get("args", [])])
        named = re.search(r"--gang-scheduler-name[= ](\S+)", words)
        scheduler = named[1] if named else "none"
        about = f"{container['image']} schedules gangs with {scheduler}"
        if scheduler == "volcano" or not (needed or self._serves("queues")):
            yield Finding("gang scheduling", "ok", about)
            return
        patch = (
            '[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--gang-scheduler-name=volcano"}]'
        )
        if not container.get("args"):
            patch = patch.replace("args/-", "args").replace('"--gang', '["--gang').replace('volcano"', 'volcano"]')
        yield Finding(
            "gang scheduling", "fail" if needed else "warn",
            f"{about}: half of a job may start, and wait for the other half",
            f"kubectl patch {where} --type json -p '{patch}'",
        )  # fmt: skip

    def _volcano_actions(self) -> Iterator[Finding]:
        import yaml

        if not self._serves("queues"):
            return
        found = self._get("/api/v1/namespaces/volcano-system/configmaps/volcano-scheduler-configmap")
        edit = "kubectl edit -n volcano-system configmap volcano-scheduler-configmap"
        if found is None:
            message = "volcano-system has no volcano-scheduler-configmap: the scheduler's actions are unknown"
            yield Finding("volcano actions", "warn", message, "look where Volcano is installed: kubectl get pods -A")
            return
        settings = yaml.safe_load(found["data"].get("volcano-scheduler.conf", "")) or {}
        actions = [action.strip() for action in str(settings.get("actions", "")).split(",")]
        missing = [action for action in ("preempt", "reclaim") if action not in actions]
        if missing:
            message = f"actions are {', '.join(actions)}: without {' and '.join(missing)}, priorities displace nothing"
            wanted = ", ".join([*(a for a in actions if a != "backfill"), *missing, "backfill"])
            yield Finding("volcano actions", "warn", message, f'{edit}, and write actions: "{wanted}"')
        else:
            yield Finding("volcano actions", "ok", f"actions are {', '.join(actions)}")

    def _volcano_queue(self) -> Iterator[Finding]:
        if not self._serves("queues") or self._scheduler not in ("", "volcano"):
            return
        wanted = (self.spec.cluster.queue if self.spec else None) or ("default" if self.spec else "holdfast")
        queue = self._get(f"/apis/scheduling.volcano.sh/v1beta1/queues/{wanted}")
        if queue is None:
            yield self._absent("volcano queue", f"there is no Volcano queue {wanted!r}", self._scheduler == "volcano")
        elif (state := queue.get("status", {}).get("state", "Open")) != "Open":
            yield Finding("volcano queue", "warn", f"{wanted} is {state}", f"vcctl queue operate -a open -n {wanted}")
        else:
            yield Finding("volcano queue", "ok", f"{wanted} is open")

    def _kueue_queue(self) -> Iterator[Finding]:
        if not self._serves("localqueues") or self._scheduler not in ("", "kueue"):
            return
        wanted = (self.spec.cluster.queue if self.spec else None) or "holdfast"
        queue = self._get(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{self.namespace}/localqueues/{wanted}")
        if queue is None:
            message = f"namespace {self.namespace} has no LocalQueue {wanted!r}"
            yield self._absent("kueue queue", message, self._scheduler == "kueue")
            return
        conditions = {each["type"]: each for each in queue.get("status", {}).get("conditions", [])}
        active = conditions.get("Active", {"status": "True"})
        if active["status"] != "True":
            message = f"{wanted} admits nothing: {active.get('message', 'inactive')}"
            look = f"kubectl describe -n {self.namespace} localqueue {wanted}"
            yield Finding("kueue queue", "fail" if self._scheduler == "kueue" else "warn", message, look)
        else:
            yield Finding("kueue queue", "ok", f"{wanted} leads to ClusterQueue {queue['spec']['clusterQueue']}")

    def _permissions(self) -> Iterator[Finding]:
        jobs = [(api.group, api.resource, JOB_VERBS) for api in APIS if api.job and api in self.served]
        denied = [
            (f"{resource}.{group}".rstrip("."), verb)
            for group, resource, verbs in [*jobs, *LAUNCHER]
            for verb in verbs
            if not self._allowed(group, resource, verb)
        ]
        if not denied:
            yield Finding("permissions", "ok", f"you may do in {self.namespace} what a launcher has to")
            return
        needed = {api.name for api in APIS if api.job and self._needs(api)}
        optional = {api.name for api in APIS if api.job} - needed
        listed = ", ".join(f"{verb} {resource}" for resource, verb in denied)
        yield Finding(
            "permissions", "warn" if all(resource in optional for resource, _ in denied) else "fail",
            f"you may not, in {self.namespace}: {listed}",
            f"bind the role: kubectl create rolebinding -n {self.namespace} holdfast-me --role holdfast-launcher "
            "--user <you>, or run as the service account holdfast-launcher",
            ExitCode.ACCESS_DENIED,
        )  # fmt: skip

    def _allowed(self, group: str, resource: str, verb: str) -> bool:
        from kubernetes import client

        name, _, part = resource.partition("/")
        asked = client.V1ResourceAttributes(
            namespace=self.namespace, group=group, resource=name, subresource=part or None, verb=verb
        )
        review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
        answer = client.AuthorizationV1Api(self.api).create_self_subject_access_review(review, _request_timeout=TIMEOUT)
        return bool(answer.status.allowed)

    def _accounts(self) -> Iterator[Finding]:
        named = getattr(self.spec.cluster, "service_account", None) if self.spec else None
        for name in dict.fromkeys(["holdfast-step", "holdfast-launcher", named or "holdfast-train"]):
            if self._get(f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{name}") is None:
                message = f"namespace {self.namespace} has no service account {name!r}"
                yield self._absent("service accounts", message, name == named)
            else:
                yield Finding("service accounts", "ok", f"{self.namespace} has {name}")

    def _priority(self) -> Iterator[Finding]:
        named = self.spec.cluster.priority_class if self.spec else None
        wanted = named or "holdfast-standard"
        if self._scheduler == "kueue":
            path, kind = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses", "WorkloadPriorityClass"
        else:
            path, kind = "/apis/scheduling.k8s.io/v1/priorityclasses", "PriorityClass"
        if self._get(f"{path}/{wanted}") is None:
            yield self._absent("priority class", f"there is no {kind} {wanted!r}", bool(named))
        else:
            yield Finding("priority class", "ok", f"{kind} {wanted} is there")

    def _absent(self, check: str, message: str, needed: bool) -> Finding:
        """Something that the manifests bring, or that the spec names wrongly."""
        remedy = (
            f"{MANIFESTS} --namespace {self.namespace}" if not needed else f"{MANIFESTS}, or name another in the spec"
        )
        return Finding(check, "fail" if needed else "warn", message, remedy)


def _store(url: str, on_cluster: bool) -> Iterator[Finding]:
    """Whether the store answers, and keeps the one promise that everything else stands on: conditional writes."""
    key = f"doctor/{secrets.token_hex(8)}"
    refused = (
        "a second writer was not refused, so two attempts could overwrite each other: use a server that honours "
        "If-None-Match and If-Match"
    )
    try:
        store = open_store(url, deadline=TIMEOUT)
        store.put_if_absent(key, b"first")
        try:
            broken = store.put_if_absent(key, b"second")
            _, version = store.get_versioned(key)
            store.compare_and_swap(key, b"third", version)
            try:
                store.compare_and_swap(key, b"fourth", version)
                broken = True
            except ConflictError:
                pass
        finally:
            store.delete(key)
    except HoldfastError as error:
        remedy = "check HOLDFAST_STORE, AWS_ENDPOINT_URL and credentials that may get, put, list and delete objects"
        yield Finding("store", "fail", f"{error}", remedy, error.exit_code)
        return
    if broken:
        yield Finding("store", "fail", f"{store.url} ignores conditional writes", refused, ExitCode.UNEXPECTED)
    elif on_cluster and url.startswith("file:"):
        remedy = "set HOLDFAST_STORE=s3://bucket/prefix, or mount the same folder into every pod (cluster.volumes)"
        yield Finding("store", "warn", f"{store.url} is a folder of this machine: pods do not see it", remedy)
    else:
        yield Finding("store", "ok", f"{store.url} answers and honours conditional writes")


def _mlflow(uri: str, on_cluster: bool) -> Iterator[Finding]:
    from holdfast.components.tracking.connection import connect

    shown = redact(uri)
    if not uri.startswith("http"):
        remedy = "set MLFLOW_TRACKING_URI to a server that the pods reach"
        message = f"{shown} is a file of this machine: pods do not see it"
        yield Finding("mlflow", "warn", message, remedy) if on_cluster else Finding("mlflow", "ok", f"{shown}, local")
        return
    try:
        connect(uri, timeout=TIMEOUT).search_experiments(max_results=1)
    except Exception as error:  # noqa: BLE001 - whatever MLflow's client raises is the finding
        said = redact(" ".join(str(error).split()))[:300]
        remedy = f"check MLFLOW_TRACKING_URI, its credentials, and the server: curl {shown}/health"
        yield Finding("mlflow", "fail", f"{shown}: {said}", remedy, ExitCode.STORE_UNREACHABLE)
    else:
        yield Finding("mlflow", "ok", f"{shown} answers")


def print_findings(findings: list[Finding]) -> str:
    """The findings for a person, in lines."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.outcome.upper():<4}  {finding.check}: {finding.message}")
        if finding.outcome != "ok" and finding.remedy:
            lines.append(f"      fix: {finding.remedy}")
    counts = {outcome: sum(each.outcome == outcome for each in findings) for outcome in ("ok", "warn", "fail")}
    lines.append(f"{counts['ok']} fine, {counts['warn']} to look at, {counts['fail']} to mend")
    return os.linesep.join(lines)
