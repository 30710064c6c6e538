"""Steps of the DAG: their table, their results, and their adapters.

A step's folder has a typed `run()`, which is authoritative, and a `__main__.py`, which calls it and reports the
result. The rest is derived from the table: the command line and KFP component (`adapters`), the Argo template, and the
terminal line.
"""

from holdfast.steps.parameter_overrides import parameter_values
from holdfast.steps.table import (
    ARTIFACTS,
    COMMON,
    FIELDS,
    PARAMETERS,
    PLACE,
    STEPS,
    TRIAL,
    Artifact,
    Parameter,
    Step,
    StepResult,
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
]
