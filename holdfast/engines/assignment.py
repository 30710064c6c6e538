"""Assignment of a launch: the resolved values that its ranks receive, and no more.

The launcher writes it once into its launch record, from a checked spec, and ranks use it unchanged. It contains nothing
about schedules, gates or registries, so these cannot stop a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from holdfast.engines.grid import Grid
from holdfast.spec import Spec
from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.cluster import COLLECTIVE_TIMEOUT_MINUTES
from holdfast.spec.data import Shuffle
from holdfast.spec.errors import DataError
from holdfast.spec.model import Model
from holdfast.spec.operations import Evaluation, Telemetry
from holdfast.spec.parallel import Parallel
from holdfast.spec.rules.objective import objective_name
from holdfast.spec.training import ObjectiveName, Training


class Assignment(BaseModel, extra="forbid", frozen=True):
    """One run as its ranks see it. Each field comes from the spec."""

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
    objective: ObjectiveName = "next_token"
    shuffle: Shuffle
    evaluation: Evaluation | None = None  # while training; None: there is none
    source_weights: tuple[float, ...] | None  # of the mixture; None reads the sources in order
    health_seconds: float | None = None  # limit of the health check before training; None: no check
    health_reason: str = ""  # why there is a health check
    pause_at: int | None = None  # the launch ends with a measured checkpoint at this step; None: at the last step
    micro_batch_candidates: tuple[int, ...] = ()  # not empty: the launch is a trial of micro-batches and trains nothing
    speeds: tuple[float, ...] = ()  # of the ranks of this launch, measured by them; empty: equal ones
    first_weights: str = ""  # digests of the weights that it reads, as in the run id

    @classmethod
    def recorded(cls, record: Mapping[str, Any], source: str) -> Assignment:
        """The assignment in the record `source` of a launch. Raises DataError if this version cannot read it."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            fields = ", ".join(sorted({str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}))
            raise DataError(
                f"{source}: its assignment cannot be read ({fields or 'not a mapping'}); another version of Holdfast "
                "wrote it: use that version for this run"
            ) from None

    @classmethod
    def of(cls, spec: Spec, run_id: str, dataset_id: str, first_weights: str = "") -> Assignment:
        """The assignment of a spec."""
        weights = [source.weight for source in spec.data.sources]
        evaluation = None
        if spec.evaluation.every_steps is not None:  # ranks call no metrics of user code
            evaluation = spec.evaluation.model_copy(update={"metrics": ()})
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
            objective=objective_name(spec),
            shuffle=spec.data.shuffle,
            evaluation=evaluation,
            source_weights=None if None in weights else tuple(weight for weight in weights if weight is not None),
            first_weights=first_weights,
        )

    def paused(self, step: int, evaluation: Evaluation) -> Assignment:
        """This assignment up to `step`, where the held-out loss is measured by the settings of `evaluation`."""
        measured = self.evaluation or evaluation.model_copy(update={"metrics": (), "tasks": ()})
        return self.model_copy(update={"pause_at": step, "evaluation": measured})

    @property
    def last_step(self) -> int:
        """The step at which the launch ends."""
        return self.training.steps if self.pause_at is None else self.pause_at

    def grid(self, ranks: int, size: int | None = None) -> Grid | None:
        """The division of a global batch (of `size` samples, if not the full size) among ranks under elastic
        determinism. None under another mode. Raises SpecError for more ranks than grains."""
        if self.training.determinism != "elastic":
            return None
        return Grid((size or self.training.global_batch) // self.training.micro_batch, ranks, self.speeds)

    @property
    def needs_group(self) -> bool:
        """Whether even a single rank needs a process group: for DeepSpeed, elastic sums and offload."""
        parallel = self.parallel
        elastic = self.training.determinism == "elastic"
        return parallel.engine == "deepspeed" or elastic or parallel.offload != "none"

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank computes per step."""
        ranks = self.parallel.processes * self.nodes
        replicas = ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)
        return self.training.global_batch // (self.training.micro_batch * replicas)
