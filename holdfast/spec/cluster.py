"""The `cluster` section: what the training job asks of a cluster, in words that no scheduler owns.

The emitters in `holdfast.launch` turn it into a PyTorchJob, a TrainJob, a Volcano Job or a Slurm script.
"""

from __future__ import annotations

import warnings
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from holdfast.spec.prices import Prices
from holdfast.spec.section import Section, plan_field, runtime_field
from holdfast.spec.slurm import Slurm

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
# What every pod reads, in the namespace that it runs in: one ConfigMap and one Secret, made once for a place.
SETTINGS, SECRETS = "holdfast-settings", "holdfast-secrets"
COLLECTIVE_TIMEOUT_MINUTES = 10.0
# The name of an extended resource, which has a prefix: rdma/hca_shared_devices_a. Huge pages have none.
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
    """How many machines train together. `min` below `max` asks for elastic training."""

    min: int = runtime_field(1, "Fewest nodes to start with.", ge=1, le=100_000)
    max: int = plan_field(1, "Most nodes to use.", ge=1, le=100_000)
    rendezvous_seconds: int = runtime_field(900, "How long the nodes wait for each other, in seconds.", ge=1, le=86_400)


class Resources(Section):
    """What each node of the training job asks for, beside its accelerators (one for each process)."""

    cpu: Quantity = runtime_field("4", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("16Gi", "Memory, as a Kubernetes quantity.")
    shared_memory: Quantity = runtime_field("8Gi", "Size of /dev/shm, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field(
        "16Gi",
        "Disk of the node for scratch files, as a Kubernetes quantity. Three quarters of it keep what is read of the "
        "datasets, unless HOLDFAST_CACHE_GIB in `cluster.environment` says less.",
    )
    extended: dict[ResourceName, Quantity] = runtime_field(
        {}, "More resources of a node, by their names: RDMA or EFA devices, huge pages such as `hugepages-2Mi`."
    )


class Restarts(Section):
    """How often a failed gang is started again before the run is given up."""

    budget: int = runtime_field(
        10, "Restarts allowed within `window_minutes`; a checkpoint in between does not refill it.", ge=0
    )
    max_stalled_launches: int = runtime_field(
        5, "Launches in a row that may end without a new checkpoint, however long each takes.", ge=1, le=1000
    )
    window_minutes: float = runtime_field(60.0, "Length of the sliding window, in minutes.", gt=0)
    backoff_seconds: float = runtime_field(
        1.0, "Wait before the second restart in a row; doubles up to one minute.", ge=0
    )


class HealthCheck(Section):
    """When the nodes of the training job are examined before they train, and how long that may take."""

    before: Literal["auto", "always", "never"] = runtime_field(
        "auto",
        "Examine every rank before an attempt. `auto`: where the job has several nodes with accelerators, and after a "
        "launch that a node is blamed for.",
    )
    seconds: float = runtime_field(4.0, "For the probes that take what they are given, in seconds.", gt=0, le=600)
    on_failure: Literal["nothing", "label"] = runtime_field(
        "nothing",
        "What becomes of a node that failed, on Kubernetes: `label` gives it the label `holdfast/health: failed`, and "
        "pods of this job avoid nodes that have it. Needs the component `node-health` of the manifests.",
    )


class Retries(Section):
    """How often a step on a cluster tries again by itself after a failure that may pass, such as a store that is away.
    What the engine of the pipeline retries comes on top. Restarts of the gang are counted in `restarts`."""

    budget: int = runtime_field(
        6, "Tries of the same step after the first; 0 leaves all of them to the engine.", ge=0, le=100
    )
    backoff_seconds: float = runtime_field(
        15.0, "Wait before the second try; doubles, and a random half of it is left out.", ge=0
    )
    max_backoff_seconds: float = runtime_field(600.0, "Longest wait between two tries.", ge=0)


class Toleration(Section):
    """A taint that the pods accept."""

    key: LabelKey = runtime_field(..., "Key of the taint.")
    operator: Literal["Exists", "Equal"] = runtime_field("Exists", "`Exists` accepts any value, `Equal` only `value`.")
    value: LabelValue | None = runtime_field(None, "Value of the taint, for `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = runtime_field(
        None, "Its effect; none means any."
    )


class StepPod(Section):
    """What the pod of a step asks for and where it stands, beside what `cluster.steps` says of all of them."""

    cpu: Quantity = runtime_field("500m", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("2Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("4Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that its node must have.")
    tolerations: tuple[Toleration, ...] = runtime_field((), "Taints that its pod accepts.", max_length=64)


class TriggerPod(StepPod):
    """The pod that decides whether a retraining is due. Where it scores the champion (`schedule.max_decay`), it is one
    like that of evaluate instead."""


class PreprocessPod(StepPod):
    """The pod that makes the dataset."""

    cpu: Quantity = runtime_field("2", "CPU cores, as a Kubernetes quantity; as many processes tokenise.")
    memory: Quantity = runtime_field("8Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("16Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")


class DividePod(PreprocessPod):
    """The pod that divides the corpus among the pods of tokenise, where `data.fan_out` asks for several."""


class TokenisePod(PreprocessPod):
    """Each of the pods that tokenise, where `data.fan_out` asks for several."""


class LauncherPod(StepPod):
    """The pod of the step train: it makes the training job, follows it and exports the model. What the job's own pods
    ask for stands in `cluster.resources`."""


class EvaluatePod(StepPod):
    """The pod that scores the model."""

    cpu: Quantity = runtime_field("2", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("8Gi", "Memory, as a Kubernetes quantity.")
    ephemeral_storage: Quantity = runtime_field("16Gi", "Disk of the node for scratch files, as a Kubernetes quantity.")
    accelerators: int = runtime_field(
        0, "Whole accelerators, of the kind `cluster.accelerator`; for a share of one see `cluster.slice`.", ge=0, le=64
    )


class RegisterPod(StepPod):
    """The pod that registers the model."""


class NotifyPod(StepPod):
    """The pod that says how it ended."""


with warnings.catch_warnings():  # of `register`, which is a method of abstract classes too
    warnings.simplefilter("ignore", UserWarning)

    class Steps(Section):
        """The pods of the steps, which work beside the training job. What stands here is for all of them; what stands
        at `cluster` itself is for the pods of the job."""

        labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the pods of all steps.")
        annotations: dict[LabelKey, str] = runtime_field({}, "Annotations of the pods of all steps.")
        node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the node of every step must have.")
        tolerations: tuple[Toleration, ...] = runtime_field(
            (), "Taints that the pods of all steps accept.", max_length=64
        )
        trigger: TriggerPod = Field(default_factory=TriggerPod, description="The step trigger.")
        divide: DividePod = Field(default_factory=DividePod, description="The step divide.")
        tokenise: TokenisePod = Field(default_factory=TokenisePod, description="Each part of the step tokenise.")
        preprocess: PreprocessPod = Field(default_factory=PreprocessPod, description="The step preprocess.")
        train: LauncherPod = Field(default_factory=LauncherPod, description="The step train.")
        evaluate: EvaluatePod = Field(default_factory=EvaluatePod, description="The step evaluate.")
        register: RegisterPod = Field(default_factory=RegisterPod, description="The step register.")
        notify: NotifyPod = Field(default_factory=NotifyPod, description="The exit handler.")


class Volume(Section):
    """A persistent volume claim that the pods mount."""

    claim: ObjectName = runtime_field(..., "Name of the PersistentVolumeClaim.")
    path: str = runtime_field(..., "Where it is mounted, an absolute path.", pattern=r"^/[^:]{0,1000}$")
    read_only: bool = runtime_field(False, "Mount it read-only.")


class Topology(Section):
    """Where the nodes of one job should stand to each other."""

    placement: Literal["any", "prefer", "require"] = runtime_field(
        "any", "Whether the nodes of the job should, or must, share one domain of `level`."
    )
    level: LabelKey = runtime_field(
        "topology.kubernetes.io/rack",
        "The node label whose value names the domain, such as a rack or a block (Kueue, affinity).",
    )
    numa: Literal["any", "prefer", "require"] = runtime_field(
        "any",
        "Whether cores and accelerators of a node should, or must, be of one NUMA node. Either makes the CPU request a "
        "limit as well, so that the kubelet gives whole cores; Volcano's Jobs also say it to the scheduler.",
    )
    tier: int = runtime_field(1, "Highest HyperNode tier that the job may span (Volcano).", ge=1, le=64)


class Cluster(Section):
    """Where the training job runs. None of it is in the run id; what can change the last bits is in the plan."""

    accelerator: Literal["cpu", "nvidia", "amd", "ascend", "gaudi", "tpu"] = plan_field("cpu", "Kind of accelerator.")
    product: str | None = runtime_field(
        None,
        "What the accelerators are called in the planner's table (H100, MI300X, …), for `parallel.auto` and `holdfast "
        "plan`. None takes what `node_selector` names.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,40}$",
    )
    network: Literal["ethernet", "infiniband", "roce", "efa"] | None = plan_field(
        None,
        "Network between the nodes, which the collectives then use or fail; none lets them choose. The plan has the "
        "variables that this sets. Its devices stand in `cluster.resources.extended`.",
    )
    nodes: Nodes = Field(default_factory=Nodes, description="Machines that train together.")
    spares: int = runtime_field(
        0,
        "More machines that stand by without a rank, imports done: one of them takes the seat of a node that is lost. "
        "They cost what the others do.",
        ge=0, le=1000,
    )  # fmt: skip
    resources: Resources = Field(default_factory=Resources, description="What each node asks for.")
    steps: Steps = Field(default_factory=Steps, description="The pods of the steps beside the job.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restart budget of the training job.")
    health: HealthCheck = Field(default_factory=HealthCheck, description="Examination of the nodes before they train.")
    retries: Retries = Field(default_factory=Retries, description="Tries of a step within its own pod.")
    job: Literal["pytorchjob", "trainjob", "volcano"] = runtime_field(
        "pytorchjob", "Kind of object that the training job becomes on Kubernetes."
    )
    namespace: NamespaceName | None = runtime_field(
        None, "Kubernetes namespace; none takes the one of the pipeline run."
    )
    service_account: ObjectName | None = runtime_field(
        None, "Service account of the training pods; none takes the namespace's default."
    )
    image: str | None = plan_field(
        None, "Image of the training job; none takes the one of the accelerator.", max_length=512
    )
    pull_secrets: tuple[ObjectName, ...] = runtime_field(
        (), "Kubernetes Secrets with which images are pulled; none needs none, or those of the service account.",
        max_length=16,
    )  # fmt: skip
    scheduler: Literal["default", "volcano", "kueue"] = runtime_field("default", "Who places the pods.")
    queue: ObjectName | None = runtime_field(None, "Volcano queue or Kueue LocalQueue.")
    priority_class: ObjectName | None = runtime_field(
        None, "Kubernetes PriorityClass; with scheduler: kueue a WorkloadPriorityClass."
    )
    slurm: Slurm = Field(default_factory=Slurm, description="Where the jobs of a run go on a Slurm.")
    topology: Topology = Field(default_factory=Topology, description="Where the nodes stand to each other.")
    labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the training job and its pods.")
    annotations: dict[LabelKey, str] = runtime_field({}, "Annotations of the training job and its pods.")
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that a node of the training job must have.")
    tolerations: tuple[Toleration, ...] = runtime_field(
        (), "Taints that the pods of the training job accept.", max_length=64
    )
    capabilities: tuple[Literal["IPC_LOCK", "SYS_NICE", "SYS_PTRACE"], ...] = runtime_field(
        (), "Linux capabilities of the training containers, which a namespace that enforces `baseline` or `restricted` "
        "refuses.", max_length=3,
    )  # fmt: skip
    volumes: tuple[Volume, ...] = runtime_field((), "Persistent volume claims to mount.", max_length=64)
    environment: dict[VariableName, str] = plan_field(
        {}, "Environment variables of every step. Never secrets. The plan records those that are known to change bits."
    )
    argo_artifacts: bool = runtime_field(
        False,
        "On Argo, put the report, the summary and the logs of the steps into the namespace's artifact repository too. "
        "Without a repository Argo fails every pod that has something for it.",
    )
    settings: ObjectName | None = runtime_field(
        SETTINGS, "ConfigMap whose keys become environment variables of every step and rank, if it is there."
    )
    secrets: tuple[ObjectName, ...] = runtime_field(
        (SECRETS,),
        "Kubernetes Secrets whose keys become environment variables of every step and rank; only "
        f"`{SECRETS}` may be missing. Ranks do not get those of MLflow, KFP, the Model Registry and the webhook.",
        max_length=64,
    )
    slice: str | None = runtime_field(
        None,
        "A share of an accelerator for evaluate, which then needs no whole one: a MIG profile such as `1g.10gb`, "
        "`shared` for a GPU that is shared by time or by MPS (nvidia), or a partition such as `cpx_nps4` (amd).",
        pattern=r"^[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?$",
    )
    prices: Prices = Field(default_factory=Prices, description="What the machines cost, for whoever pays for them.")
    stragglers: Literal["report", "exclude"] = runtime_field(
        "report",
        "What comes of a rank that is slower than its like: `report` names it; `exclude` also starts the next launch, "
        "whenever there is one, without its node.",
    )
    spot: Literal["aws", "gcp", "azure"] | None = runtime_field(
        None,
        "Cloud whose notices that it takes a machine back are listened for on every node of the training job: the gang "
        "then saves and leaves, and starts again at no cost of `restarts`. None asks nobody.",
    )
    collective_timeout_minutes: float = runtime_field(
        COLLECTIVE_TIMEOUT_MINUTES,
        "How long a rank waits for the other ranks in one collective before the launch fails (retryable), in minutes. "
        "Raise it where one rank needs longer than that for a compilation or for loading.",
        ge=0.1, le=1440,
    )  # fmt: skip
    pending_timeout_minutes: float = runtime_field(
        60.0, "Give a job up (retryable) when its pods could not be scheduled for so long, in minutes.", gt=0
    )
    deadline_hours: float | None = runtime_field(None, "End the job after so long, in hours; none never does.", gt=0)
    ttl_minutes: float = runtime_field(60.0, "How long a finished job and its pods are kept, in minutes.", ge=0)
