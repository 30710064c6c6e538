"""What a step of the DAG is: the table of all of them, what each gives back, and the faces it shows to the world.

A step's folder has a typed `run()` (the truth) and a `body.py`, which calls it and says what came of it. Everything
else is derived from the table: its command line and KFP component (`faces`), its Argo template, its terminal line.
"""

from holdfast.steps.changes import values_of
from holdfast.steps.result import Artifact, Done
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
    giver_of,
)

__all__ = [
    "ARTIFACTS", "COMMON", "FIELDS", "PARAMETERS", "PLACE", "STEPS", "TRIAL", "Artifact", "Done", "Parameter", "Step",
    "giver_of", "values_of",
]  # fmt: skip
