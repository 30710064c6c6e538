"""The `cluster` section: what the training job asks of a cluster, in words that no scheduler owns.

The emitters in `holdfast.components.launch` turn it into a PyTorchJob, a TrainJob, a Volcano Job or a Slurm script.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from holdfast.components.spec.section import Section, knob, plan_field

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
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
# A key of a label, with an optional prefix.
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


def amount(quantity: str) -> Decimal:
    """A Kubernetes quantity as a number: cores, or bytes."""
    digits = quantity.rstrip("mkMGTPKi")
    return Decimal(digits) * _UNITS[quantity[len(digits) :]]


class Nodes(Section):
    """How many machines train together. `min` below `max` asks for elastic training."""

    min: int = knob(1, "Fewest nodes to start with.", ge=1, le=100_000)
    max: int = plan_field(1, "Most nodes to use.", ge=1, le=100_000)
    rendezvous_seconds: int = knob(900, "How long the nodes wait for each other, in seconds.", ge=1, le=86_400)


class Resources(Section):
    """What each node of the training job asks for, beside its accelerators (one for each process)."""

    cpu: Quantity = knob("4", "CPU cores, as a Kubernetes quantity.")
    memory: Quantity = knob("16Gi", "Memory, as a Kubernetes quantity.")
    shared_memory: Quantity = knob("8Gi", "Size of /dev/shm, as a Kubernetes quantity.")


class StepResources(Section):
    """What the steps that work beside the training job ask for. The other steps need next to nothing."""

    cpu: Quantity = knob("2", "CPU cores of preprocess and evaluate, as a Kubernetes quantity.")
    memory: Quantity = knob("8Gi", "Memory of preprocess and evaluate, as a Kubernetes quantity.")


class Restarts(Section):
    """How often a failed gang is started again before the run is given up."""

    budget: int = knob(
        10, "Restarts allowed within `window_minutes`; a checkpoint in between does not refill it.", ge=0
    )
    window_minutes: float = knob(60.0, "Length of the sliding window, in minutes.", gt=0)
    backoff_seconds: float = knob(1.0, "Wait before the second restart in a row; doubles up to one minute.", ge=0)


class Toleration(Section):
    """A taint that the pods accept."""

    key: LabelKey = knob(..., "Key of the taint.")
    operator: Literal["Exists", "Equal"] = knob("Exists", "`Exists` accepts any value, `Equal` only `value`.")
    value: LabelValue | None = knob(None, "Value of the taint, for `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = knob(None, "Its effect; none means any.")


class Volume(Section):
    """A persistent volume claim that the pods mount."""

    claim: ObjectName = knob(..., "Name of the PersistentVolumeClaim.")
    path: str = knob(..., "Where it is mounted, an absolute path.", pattern=r"^/[^:]{0,1000}$")
    read_only: bool = knob(False, "Mount it read-only.")


class Topology(Section):
    """Where the nodes of one job should stand to each other."""

    placement: Literal["any", "prefer", "require"] = knob(
        "any", "Whether the nodes of the job should, or must, share one domain of `level`."
    )
    level: LabelKey = knob(
        "topology.kubernetes.io/rack",
        "The node label whose value names the domain, such as a rack or a block (Kueue, affinity).",
    )
    tier: int = knob(1, "Highest HyperNode tier that the job may span (Volcano).", ge=1, le=64)


class Cluster(Section):
    """Where the training job runs. None of it is in the run id; what can change the last bits is in the plan."""

    accelerator: Literal["cpu", "nvidia", "amd", "ascend", "gaudi"] = plan_field("cpu", "Kind of accelerator.")
    nodes: Nodes = Field(default_factory=Nodes, description="Machines that train together.")
    resources: Resources = Field(default_factory=Resources, description="What each node asks for.")
    steps: StepResources = Field(default_factory=StepResources, description="What preprocess and evaluate ask for.")
    restarts: Restarts = Field(default_factory=Restarts, description="Restart budget of the training job.")
    job: Literal["pytorchjob", "trainjob", "volcano"] = knob(
        "pytorchjob", "Kind of object that the training job becomes on Kubernetes."
    )
    namespace: ObjectName | None = knob(None, "Kubernetes namespace; none takes the one of the pipeline run.")
    service_account: ObjectName | None = knob(
        None, "Service account of the training pods; none takes the namespace's default."
    )
    image: str | None = plan_field(
        None, "Image of the training job; none takes the one of the accelerator.", max_length=512
    )
    pull_secrets: tuple[ObjectName, ...] = knob(
        (), "Kubernetes Secrets with which images are pulled; none needs none, or those of the service account.",
        max_length=16,
    )  # fmt: skip
    scheduler: Literal["default", "volcano", "kueue"] = knob("default", "Who places the pods.")
    queue: ObjectName | None = knob(None, "Volcano queue or Kueue LocalQueue.")
    priority_class: ObjectName | None = knob(
        None, "Kubernetes PriorityClass; with scheduler: kueue a WorkloadPriorityClass."
    )
    topology: Topology = Field(default_factory=Topology, description="Where the nodes stand to each other.")
    node_selector: dict[LabelKey, LabelValue] = knob({}, "Labels that a node must have.")
    tolerations: tuple[Toleration, ...] = knob((), "Taints that the pods accept.", max_length=64)
    volumes: tuple[Volume, ...] = knob((), "Persistent volume claims to mount.", max_length=64)
    environment: dict[VariableName, str] = plan_field(
        {}, "Environment variables of every step. Never secrets. The plan records those that are known to change bits."
    )
    secrets: tuple[ObjectName, ...] = knob(
        (), "Kubernetes Secrets whose keys become environment variables of every step.", max_length=64
    )
    slice: str | None = knob(
        None,
        "A share of an accelerator for the light steps: a MIG profile such as `1g.10gb` (nvidia), or a partition such "
        "as `cpx_nps4` (amd); none gives them CPU only.",
        pattern=r"^[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?$",
    )
    pending_minutes: float = knob(
        60.0, "Give a job up (retryable) when its pods could not be scheduled for so long, in minutes.", gt=0
    )
    deadline_hours: float | None = knob(None, "End the job after so long, in hours; none never does.", gt=0)
    keep_minutes: float = knob(60.0, "How long a finished job and its pods are kept, in minutes.", ge=0)
