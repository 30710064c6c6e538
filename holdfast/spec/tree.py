"""The whole spec as one tree: the content of the file that describes a training run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.cluster import Cluster
from holdfast.spec.data import Data, NoData
from holdfast.spec.errors import require_package
from holdfast.spec.model import Model
from holdfast.spec.operations import Evaluation, Registration, Retraining, Serving, Telemetry
from holdfast.spec.parallel import Parallel
from holdfast.spec.script import Script
from holdfast.spec.section import Section, runtime_field
from holdfast.spec.training import Training

SPEC_VERSION = 1


class Spec(Section):
    """One training run, from raw text to a registered model."""

    version: Literal[1] = Field(1, description="Version of the spec's format.")
    name: str = runtime_field(
        ...,
        "Name of the run's family: lower-case letters, digits and dashes, with a letter first and no dash last. It is "
        "the default name of the registered model.",
        pattern=r"^[a-z]([a-z0-9-]{0,49}[a-z0-9])?$",
    )
    code: str | None = runtime_field(
        None,
        "Digest of the bundle of your own code. Holdfast fills it in when you submit the spec; leave it out.",
        pattern=r"^blake3:[0-9a-f]{64}$",
    )
    store: str | None = runtime_field(
        None,
        "Root of the store: file:///path, s3://, gs:// or az://bucket/prefix. Default: HOLDFAST_STORE, or else a "
        "folder in HOLDFAST_HOME.",
    )
    data: Data = Field(
        default_factory=NoData,
        description="Where text comes from and how it becomes tokens. Required, except with `train.script`, "
        "which reads it by `session.dataset`.",
    )
    train: Script = Field(default_factory=Script, description="A training script in place of Holdfast's loop.")
    model: Model = Field(default_factory=Model, description="The shape of the model.")
    training: Training = Field(default_factory=Training, description="The computation of every step.")
    parallel: Parallel = Field(default_factory=Parallel, description="How a step is distributed over processes.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When the state is saved, and what is kept.")
    cluster: Cluster = Field(default_factory=Cluster, description="Where the training job runs.")
    telemetry: Telemetry = Field(default_factory=Telemetry, description="Metrics of a training run.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Conditions for blessing a model.")
    registration: Registration = Field(default_factory=Registration, description="Where the model is registered.")
    serving: Serving = Field(default_factory=Serving, description="What happens to a registered model.")
    schedule: Retraining = Field(default_factory=Retraining, description="When the pipeline runs on a schedule.")

    @field_validator("data", mode="before")
    @classmethod
    def _no_data(cls, value: object) -> object:
        """Read the dump of a spec without data."""
        return NoData() if value == NoData().model_dump(mode="json") else value

    def with_overrides(self, overrides: Iterable[str] | Mapping[str, Any]) -> Spec:
        """This spec with some fields changed, and checked as a whole. `overrides` are `field=value`, as in `--set`, or
        values by field, such as `{"parallel.tensor": 2}`. Raises SpecError with every problem found."""
        from holdfast.spec.load import parse_spec  # the rules need this class

        if isinstance(overrides, Mapping):
            overrides = [f"{field}={json.dumps(value)}" for field, value in overrides.items()]
        return parse_spec(self.model_dump(mode="json"), overrides)

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.parallel.processes * self.cluster.nodes.max

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different samples."""
        return self.world_size // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank computes for a step."""
        return self.training.global_batch // (self.training.micro_batch * self.data_parallel_size)

    @property
    def is_evaluated(self) -> bool:
        """Whether steps after training score and register the model. A training script says how: by `evaluation`."""
        return self.train.script is None or bool(self.evaluation.command or self.evaluation.metrics)

    @property
    def registered_model(self) -> str:
        """Name of the registered model, with the default resolved."""
        return self.registration.model or self.name

    @property
    def experiment(self) -> str:
        """MLflow experiment, with the default resolved."""
        return self.registration.experiment or self.name


def require_trackers(spec: Spec) -> None:
    """Raise MissingError if the package of a tracker of `telemetry.trackers` is not installed on this machine."""
    for name in spec.telemetry.trackers:
        require_package(name, f"telemetry.trackers: {name}", f"remove {name} from telemetry.trackers")
