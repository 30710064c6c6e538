"""The `cluster` section: what the training job requests from a cluster, in terms that are neutral to schedulers.

The emitters in `holdfast.launch` turn it into a PyTorchJob, a TrainJob, a Volcano Job or a Slurm script.
"""

import warnings
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from holdfast.spec.prices import Prices
from holdfast.spec.section import Section, plan_field, runtime_field

# The `cluster.slurm` section: settings that only Slurm has.

# A name in Slurm: a partition (or several, separated by commas), an account, or a quality of service.
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,126}$")]
Constraint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]{0,254}$")]


class Slurm(Section):
    """Settings of the jobs of a run on Slurm. For fields that are not given, SBATCH_* variables or the site decide."""

    partition: SlurmName | None = runtime_field(
        None, "Partition, or several separated by commas. Default: the site's default."
    )
    account: SlurmName | None = runtime_field(None, "Account that is charged. Default: your account.")
    qos: SlurmName | None = runtime_field(None, "Quality of service. Default: the site's default.")
    constraint: Constraint | None = runtime_field(
        None, "Features that the training nodes must have, as for `--constraint`."
    )
    slot_minutes: int | None = runtime_field(
        None,
        "Time limit of one allocation, in minutes. Training saves before the limit and returns to the queue. Default: "
        "the limit of the partition.",
        ge=1,
        le=525_600,
    )


_UNITS = {"m": Decimal("0.001"), "": Decimal(1)}
_UNITS |= {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTP", 1)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTP", 1)}
_QUANTITY = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

# A Kubernetes quantity: 4, 500m, 16Gi, 1.5G. YAML may give it as a number.
Quantity = Annotated[
    str,
    Field(pattern=_QUANTITY, coerce_numbers_to_str=True),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": _QUANTITY}, {"type": "number", "minimum": 0}]}),
]
# A name of a Kubernetes object.
ObjectName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*$", max_length=253),
]
NamespaceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
# A key of a label, with an optional prefix.
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
ContextName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x20\x7f-][^\x00-\x1f\x7f]{0,252}$")]
# Every pod reads one ConfigMap and one Secret of its namespace. They are created once for each namespace.
SETTINGS, SECRETS = "holdfast-settings", "holdfast-secrets"
COLLECTIVE_TIMEOUT_MINUTES = 10.0
# The name of an extended resource has a prefix, as in rdma/hca_shared_devices_a. Huge pages have no prefix.
ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9.-]{1,253}/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?|hugepages-[0-9]{1,9}[KMG]i)$"
    ),
]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


def amount(quantity: str) -> Decimal:
    """A Kubernetes quantity as a number: cores, or bytes."""
    digits = quantity.rstrip("mkMGTPKi")
    return Decimal(digits) * _UNITS[quantity[len(digits) :]]


class Nodes(Section):
    """How many machines train together. `min` below `max` makes training elastic."""

    min: int = runtime_field(1, "Minimum number of nodes to start with.", ge=1, le=100_000)
    max: int = plan_field(1, "Maximum number of nodes.", ge=1, le=100_000)
    rendezvous_seconds: int = runtime_field(900, "How long the nodes wait for each other, in seconds.", ge=1, le=86_400)


class Resources(Section):
    """What each node of the training job requests, in addition to one accelerator for each process."""

    cpu: Quantity = runtime_field("4", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("16Gi", "Memory, as a Kubernetes quantity.")
    shared_memory: Quantity = runtime_field("8Gi", "Size of /dev/shm, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field(
        "16Gi",
        "Disk of the node for scratch files, as a Kubernetes quantity. Three quarters of it cache the datasets. "
        "HOLDFAST_CACHE_GIB in `cluster.environment` sets a smaller cache.",
    )
    extended: dict[ResourceName, Quantity] = runtime_field(
        {}, "Other resources of a node, by name: RDMA or EFA devices, huge pages such as `hugepages-2Mi`."
    )


class Restarts(Section):
    """How often a failed gang is restarted before the run fails."""

    budget: int = runtime_field(
        10, "Restarts allowed within `window_minutes`. A checkpoint does not reset the count.", ge=0
    )
    max_stalled_launches: int = runtime_field(
        5, "Consecutive launches that may end without a new checkpoint, however long each takes.", ge=1, le=1000
    )
    window_minutes: float = runtime_field(60.0, "Length of the sliding window, in minutes.", gt=0)
    backoff_seconds: float = runtime_field(
        1.0, "Wait before the second consecutive restart, in seconds. It doubles, up to one minute.", ge=0
    )


class HealthCheck(Section):
    """Health check of the nodes of the training job before they train: when it runs, and how long it may take."""

    before: Literal["auto", "always", "never"] = runtime_field(
        "auto",
        "When every rank is checked before an attempt. `auto`: if the job has several nodes with accelerators, and "
        "after a launch whose failure is attributed to a node.",
    )
    seconds: float = runtime_field(4.0, "Time for the probes that can use any amount of it, in seconds.", gt=0, le=600)
    on_failure: Literal["nothing", "label"] = runtime_field(
        "nothing",
        "What happens to a node that failed, on Kubernetes. `label` gives it the label `holdfast/health: failed`, and "
        "pods of this job avoid nodes with that label. It needs the component `node-health` of the manifests.",
    )


class Retries(Section):
    """How often a step on a cluster retries in its own pod after a transient failure, such as an unreachable store.
    Retries by the pipeline engine are additional. `restarts` counts restarts of the gang."""

    budget: int = runtime_field(6, "Retries of the same step; 0 leaves all retries to the engine.", ge=0, le=100)
    backoff_seconds: float = runtime_field(
        15.0, "Wait before the second try, in seconds. It doubles, and is shortened at random by up to a half.", ge=0
    )
    max_backoff_seconds: float = runtime_field(600.0, "Longest wait between two tries, in seconds.", ge=0)


class Toleration(Section):
    """A taint that the pods accept."""

    key: LabelKey = runtime_field(..., "Key of the taint.")
    operator: Literal["Exists", "Equal"] = runtime_field("Exists", "`Exists` accepts any value, `Equal` only `value`.")
    value: LabelValue | None = runtime_field(None, "Value of the taint, for `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = runtime_field(
        None, "Effect of the taint. Default: any effect."
    )


class StepPod(Section):
    """What the pod of a step requests and where it runs, in addition to what `cluster.steps` sets for all."""

    cpu: Quantity = runtime_field("500m", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("2Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("4Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the node must have.")
    tolerations: tuple[Toleration, ...] = runtime_field((), "Taints that the pod accepts.", max_length=64)


class TriggerPod(StepPod):
    """The pod that decides whether a retraining is due. With `schedule.max_decay` it scores the champion, and uses the
    settings of evaluate instead."""


class PreprocessPod(StepPod):
    """The pod that creates the dataset."""

    cpu: Quantity = runtime_field("2", "CPU cores, as a Kubernetes quantity. That many processes tokenize.")
    memory: Quantity = runtime_field("8Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("16Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")


class DividePod(PreprocessPod):
    """The pod that divides the corpus among the pods of tokenise, if `data.fan_out` is above 1."""


class TokenisePod(PreprocessPod):
    """Each of the pods that tokenize, if `data.fan_out` is above 1."""


class LauncherPod(StepPod):
    """The pod of the step train. It creates the training job, follows it and exports the model. `cluster.resources`
    sets what the pods of the job request."""


class EvaluatePod(StepPod):
    """The pod that scores the model."""

    cpu: Quantity = runtime_field("2", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("8Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("16Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")
    accelerators: int = runtime_field(
        0, "Whole accelerators, of the kind `cluster.accelerator`. For part of one see `cluster.slice`.", ge=0, le=64
    )


class RegisterPod(StepPod):
    """The pod that registers the model."""


class NotifyPod(StepPod):
    """The pod that reports how the pipeline run ended."""


with warnings.catch_warnings():  # about `register`, which is also a method of abstract classes
    warnings.simplefilter("ignore", UserWarning)

    class Steps(Section):
        """The pods of the steps. The settings here apply to all of them. The settings of `cluster` itself apply to the
        pods of the training job."""

        labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the pods of all steps.")
        annotations: dict[LabelKey, str] = runtime_field({}, "Annotations of the pods of all steps.")
        node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the node of every step must have.")
        tolerations: tuple[Toleration, ...] = runtime_field(
            (), "Taints that the pods of all steps accept.", max_length=64
        )
        trigger: TriggerPod = Field(default_factory=TriggerPod, description="The step trigger.")
        divide: DividePod = Field(default_factory=DividePod, description="The step divide.")
        tokenise: TokenisePod = Field(default_factory=TokenisePod, description="Each pod of the step tokenise.")
        preprocess: PreprocessPod = Field(default_factory=PreprocessPod, description="The step preprocess.")
        train: LauncherPod = Field(default_factory=LauncherPod, description="The step train.")
        evaluate: EvaluatePod = Field(default_factory=EvaluatePod, description="The step evaluate.")
        register: RegisterPod = Field(default_factory=RegisterPod, description="The step register.")
        notify: NotifyPod = Field(default_factory=NotifyPod, description="The exit handler.")


class Volume(Section):
    """A persistent volume claim that the pods mount."""

    claim: ObjectName = runtime_field(..., "Name of the PersistentVolumeClaim.")
    path: str = runtime_field(..., "Mount point, an absolute path.", pattern=r"^/[^:]{0,1000}$")
    read_only: bool = runtime_field(False, "Mount it read-only.")


class Topology(Section):
    """Placement of the nodes of one job relative to each other."""

    placement: Literal["any", "prefer", "require"] = runtime_field(
        "any", "Whether the nodes of the job should (`prefer`) or must (`require`) share one domain of `level`."
    )
    level: LabelKey = runtime_field(
        "topology.kubernetes.io/rack",
        "The node label whose value names the domain, such as a rack or a block (Kueue, affinity).",
    )
    numa: Literal["any", "prefer", "require"] = runtime_field(
        "any",
        "Whether cores and accelerators of a node should (`prefer`) or must (`require`) be of one NUMA node. Both also "
        "set the CPU request as the limit, so that the kubelet assigns whole cores. Volcano Jobs also pass it to the "
        "scheduler.",
    )
    tier: int = runtime_field(1, "Highest HyperNode tier that the job may span (Volcano).", ge=1, le=64)


class Cluster(Section):
    """Where the training job runs. No field is in the run id. Fields that can change the last bits are in the plan."""

    accelerator: Literal["cpu", "nvidia", "amd", "ascend", "gaudi", "tpu"] = plan_field("cpu", "Kind of accelerator.")
    product: str | None = runtime_field(
        None,
        "Name of the accelerator in the planner's table (H100, MI300X, …), for `parallel.auto` and `holdfast plan`. "
        "Default: the one that `node_selector` names.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,40}$",
    )
    network: Literal["ethernet", "infiniband", "roce", "efa"] | None = plan_field(
        None,
        "Network between the nodes. The collectives use it or fail; `null` lets them choose. The plan records the "
        "variables that it sets. List its devices in `cluster.resources.extended`.",
    )
    nodes: Nodes = Field(default_factory=Nodes, description="Machines that train together.")
    spares: int = runtime_field(
        0,
        "Additional machines that wait without a rank, with imports done. A spare replaces a lost node. It costs as "
        "much as a node that trains.",
        ge=0,
        le=1000,
    )
    resources: Resources = Field(default_factory=Resources, description="What each node requests.")
    steps: Steps = Field(default_factory=Steps, description="The pods of the steps.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restart budget of the training job.")
    health: HealthCheck = Field(default_factory=HealthCheck, description="Health check of the nodes before they train.")
    retries: Retries = Field(default_factory=Retries, description="Retries of a step within its own pod.")
    job: Literal["pytorchjob", "trainjob", "volcano"] = runtime_field(
        "pytorchjob", "Kind of Kubernetes object for the training job."
    )
    namespace: NamespaceName | None = runtime_field(
        None, "Kubernetes namespace. Default: the namespace of the pipeline run."
    )
    contexts: tuple[ContextName, ...] = runtime_field(
        (),
        "Contexts of the kubeconfig, in order: a run on Argo is submitted to the first one whose cluster takes it. "
        "Default: the current context.",
        max_length=16,
    )
    service_account: ObjectName | None = runtime_field(
        None, "Service account of the training pods. Default: the default account of the namespace."
    )
    image: str | None = plan_field(
        None, "Image of the training job. Default: the image for the accelerator.", max_length=512
    )
    pull_secrets: tuple[ObjectName, ...] = runtime_field(
        (),
        "Kubernetes Secrets for pulling images. Default: those of the service account, if any.",
        max_length=16,
    )
    scheduler: Literal["default", "volcano", "kueue"] = runtime_field("default", "Scheduler that places the pods.")
    queue: ObjectName | None = runtime_field(None, "Volcano queue or Kueue LocalQueue.")
    priority_class: ObjectName | None = runtime_field(
        None, "Kubernetes PriorityClass; with `scheduler: kueue` a WorkloadPriorityClass."
    )
    slurm: Slurm = Field(default_factory=Slurm, description="Settings of the jobs of a run on Slurm.")
    topology: Topology = Field(default_factory=Topology, description="Placement of the nodes relative to each other.")
    labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the training job and its pods.")
    annotations: dict[LabelKey, str] = runtime_field({}, "Annotations of the training job and its pods.")
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that a node of the training job must have.")
    tolerations: tuple[Toleration, ...] = runtime_field(
        (), "Taints that the pods of the training job accept.", max_length=64
    )
    capabilities: tuple[Literal["IPC_LOCK", "SYS_NICE", "SYS_PTRACE"], ...] = runtime_field(
        (),
        "Linux capabilities of the training containers. A namespace that enforces `baseline` or `restricted` "
        "refuses them.",
        max_length=3,
    )
    volumes: tuple[Volume, ...] = runtime_field((), "Persistent volume claims to mount.", max_length=64)
    environment: dict[VariableName, str] = plan_field(
        {}, "Environment variables of every step, never secrets. The plan records those that are known to change bits."
    )
    argo_artifacts: bool = runtime_field(
        False,
        "On Argo, also put the report, the summary and the logs of the steps into the namespace's artifact repository. "
        "Without a repository, Argo fails every pod that has such an artifact.",
    )
    settings: ObjectName | None = runtime_field(
        SETTINGS, "ConfigMap whose keys become environment variables of every step and rank. It may be missing."
    )
    secrets: tuple[ObjectName, ...] = runtime_field(
        (SECRETS,),
        "Kubernetes Secrets whose keys become environment variables of every step and rank. Of two with one key the "
        f"last counts. Only `{SECRETS}` may be missing, and it is the last. A pod of ranks gets only its keys of S3, "
        "the Hub and traces, and from other Secrets no key of MLflow, KFP, the Model Registry and the webhook.",
        max_length=64,
    )
    slice: str | None = runtime_field(
        None,
        "Part of an accelerator for evaluate, instead of a whole one. With nvidia: a MIG profile such as `1g.10gb`, or "
        "`shared` for a GPU that is shared by time slicing or MPS. With amd: a partition such as `cpx_nps4`.",
        pattern=r"^[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?$",
    )
    prices: Prices = Field(default_factory=Prices, description="What the machines cost.")
    stragglers: Literal["report", "exclude"] = runtime_field(
        "report",
        "What happens about a rank that is slower than its peers. `report` names it. `exclude` also starts the next "
        "launch, if one follows, without its node.",
    )
    spot: Literal["aws", "gcp", "azure"] | None = runtime_field(
        None,
        "Cloud whose reclaim notices every node of the training job polls for. On a notice the gang saves and exits. "
        "It starts again without using up `restarts`. `null`: no polling.",
    )
    collective_timeout_minutes: float = runtime_field(
        COLLECTIVE_TIMEOUT_MINUTES,
        "How long a rank waits for the other ranks in one collective, in minutes. Then the launch fails (retryable). "
        "Raise it if a rank needs longer for compilation or loading.",
        ge=0.1,
        le=1440,
    )
    pending_timeout_minutes: float = runtime_field(
        60.0, "The job fails (retryable) if its pods are not scheduled within this time, in minutes.", gt=0
    )
    deadline_hours: float | None = runtime_field(None, "Time limit of the job, in hours. Default: no limit.", gt=0)
    ttl_minutes: float = runtime_field(60.0, "How long a finished job and its pods remain, in minutes.", ge=0)
