"""Assignment of a launch that runs a script: what its ranks receive through the launch record.

It holds no code, no arguments and no name of a file to run. These are on the command line of the job, so a change of
the store cannot change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast.spec.errors import DataError
from holdfast.spec.operations import Telemetry
from holdfast.spec.training import Anomalies, Checkpoint


class ScriptAssignment(BaseModel):
    """One run of a script as its ranks see it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    anomalies: Anomalies = Anomalies()  # for the retention of checkpoints; a script has none

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
