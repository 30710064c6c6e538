"""What the ranks of a launch are told: resolved values and no more.

The launcher writes it into its launch record once, from a spec that was checked; ranks take it as it stands. It knows
nothing of schedules, gates or registries, so that nothing of them can stop a rank.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from holdfast.components.train.grid import Grid
from holdfast.spec import Spec
from holdfast.spec.cluster import COLLECTIVE_TIMEOUT_MINUTES
from holdfast.spec.data import Shuffle
from holdfast.spec.model import Model
from holdfast.spec.telemetry import Telemetry
from holdfast.spec.training import Checkpoint, Parallel, Training


class Assignment(BaseModel):
    """One run as its ranks see it. `spec` names its source field by field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    dataset_id: str
    model: Model
    training: Training
    parallel: Parallel
    checkpoint: Checkpoint
    telemetry: Telemetry = Telemetry()
    accelerator: str
    nodes: int
    collective_timeout_minutes: float = COLLECTIVE_TIMEOUT_MINUTES
    document_masks: bool
    preferences: bool = False  # rows are pairs of answers
    shuffle: Shuffle
    source_weights: tuple[float, ...] | None  # of the mixture; None reads the sources as they are
    health_seconds: float | None = None  # for the examination of the ranks before they train; None: there is none
    health_reason: str = ""  # why there is one
    first_weights: str = ""  # digest of the weights that model.init_from names, as it is in the run id

    @classmethod
    def of(cls, spec: Spec, run_id: str, dataset_id: str, first_weights: str = "") -> Assignment:
        """The assignment that a spec makes."""
        weights = [source.weight for source in spec.data.sources]
        return cls(
            run_id=run_id,
            dataset_id=dataset_id,
            model=spec.model,
            training=spec.training,
            parallel=spec.parallel,
            checkpoint=spec.checkpoint,
            telemetry=spec.telemetry,
            accelerator=spec.cluster.accelerator,
            nodes=spec.cluster.nodes.max,
            collective_timeout_minutes=spec.cluster.collective_timeout_minutes,
            document_masks=spec.data.document_masks,
            preferences=spec.data.kind == "preferences",
            shuffle=spec.data.shuffle,
            source_weights=None if None in weights else tuple(weight for weight in weights if weight is not None),
            first_weights=first_weights,
        )

    def grid(self, ranks: int, size: int | None = None) -> Grid | None:
        """How a global batch (of `size` samples, where it is not the whole one) is dealt to ranks under elastic
        determinism; None under another. Raises SpecError when there are more of them than grains."""
        if self.training.determinism != "elastic":
            return None
        return Grid((size or self.training.global_batch) // self.training.micro_batch, ranks)

    @property
    def needs_group(self) -> bool:
        """Whether even one rank alone has a process group: DeepSpeed, elastic sums and what lies with the host ask."""
        parallel = self.parallel
        elastic = self.training.determinism == "elastic"
        return parallel.engine == "deepspeed" or elastic or parallel.offload != "none"

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank computes for a step."""
        ranks = self.parallel.processes * self.nodes
        replicas = ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)
        return self.training.global_batch // (self.training.micro_batch * replicas)
