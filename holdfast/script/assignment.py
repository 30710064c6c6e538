"""Assignment of a launch that runs a script: what its ranks receive through the launch record.

It holds no code, no arguments and no name of a file to run. These are on the command line of the job, so a change of
the store cannot change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from holdfast.spec import Spec
from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.data import Shuffle
from holdfast.spec.errors import DataError
from holdfast.spec.operations import Telemetry
from holdfast.spec.training import Anomalies


class ScriptAssignment(BaseModel, extra="forbid", frozen=True):
    """One run of a script as its ranks see it."""

    kind: Literal["script"] = "script"
    run_id: str
    determinism: Literal["off", "exact"]
    restart_on: Literal["lost", "any"]
    log_every: int
    processes: int
    threads: int
    nodes: int
    accelerator: str
    checkpoint: Checkpoint
    telemetry: Telemetry
    dataset_id: str = ""  # of `data`; empty: the script reads its own data
    shuffle: Shuffle = Shuffle()
    source_weights: tuple[float | None, ...] = ()
    stop_at: int | None = None  # the step after which a verification saves and ends the script
    anomalies: Anomalies = Anomalies()  # for the retention of checkpoints; a script has none

    @classmethod
    def of(cls, spec: Spec, run_id: str, dataset_id: str) -> ScriptAssignment:
        """The assignment of a spec with a script."""
        return cls(
            run_id=run_id,
            determinism=spec.train.determinism,
            restart_on=spec.train.restart_on,
            log_every=spec.train.log_every,
            processes=spec.parallel.processes,
            threads=spec.parallel.threads,
            nodes=spec.cluster.nodes.max,
            accelerator=spec.cluster.accelerator,
            checkpoint=spec.checkpoint,
            telemetry=spec.telemetry,
            dataset_id=dataset_id,
            shuffle=spec.data.shuffle,
            source_weights=tuple(source.weight for source in spec.data.sources),
        )

    @classmethod
    def recorded(cls, record: Mapping[str, Any], source: str) -> ScriptAssignment:
        """The assignment in the record `source` of a launch. Raises DataError if this version cannot read it."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            raise DataError(
                f"{source}: its assignment is not that of a script ({error.error_count()} problems); use the version "
                "of Holdfast that launched it"
            ) from None
