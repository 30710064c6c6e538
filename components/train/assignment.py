"""What the ranks of a launch are told: resolved values and no more.

The launcher writes it into its launch record once, from a spec that was checked; ranks take it as it stands. It knows
nothing of schedules, gates or registries, so that nothing of them can stop a rank.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from holdfast.components.spec import Spec
from holdfast.components.spec.data import Shuffle
from holdfast.components.spec.model import Model
from holdfast.components.spec.training import Checkpoint, Parallel, Training


class Assignment(BaseModel):
    """One run as its ranks see it. `spec` names its source field by field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    dataset_id: str
    model: Model
    training: Training
    parallel: Parallel
    checkpoint: Checkpoint
    accelerator: str
    nodes: int
    document_masks: bool
    shuffle: Shuffle
    source_weights: tuple[float, ...] | None  # of the mixture; None reads the sources as they are
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
            accelerator=spec.cluster.accelerator,
            nodes=spec.cluster.nodes.max,
            document_masks=spec.data.document_masks,
            shuffle=spec.data.shuffle,
            source_weights=None if None in weights else tuple(weight for weight in weights if weight is not None),
            first_weights=first_weights,
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank computes for a step."""
        ranks = self.parallel.processes * self.nodes
        replicas = ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)
        return self.training.global_batch // (self.training.micro_batch * replicas)
