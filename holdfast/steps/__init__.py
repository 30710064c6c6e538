"""What a step of the DAG is: the table of all of them, what each gives back, and its adapters.

A step's folder has a typed `run()` (the truth) and an `entrypoint.py`, which calls it and says what came of it.
Everything else is derived from the table: its command line and KFP component (`adapters`), its Argo template, its
terminal line.
"""

from holdfast.steps.parameter_overrides import parameter_values
from holdfast.steps.result import Artifact, StepResult
from holdfast.steps.table import (
    ARTIFACTS,
    COMMON,
    FIELDS,
    PARAMETERS,
    PLACE,
    STEPS,
    TRIAL,
    Parameter,
    Step,
    producer_of,
)

__all__ = [
    "ARTIFACTS",
    "COMMON",
    "FIELDS",
    "PARAMETERS",
    "PLACE",
    "STEPS",
    "TRIAL",
    "Artifact",
    "Parameter",
    "Step",
    "StepResult",
    "parameter_values",
    "producer_of",
]  # fmt: skip
