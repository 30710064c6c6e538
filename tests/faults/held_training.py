"""The train step, as `python -m holdfast.components.train` runs it, whose ranks compute no step above the number in a
file (`held_worker`).
"""

import os
import sys
from dataclasses import replace
from typing import Any

from holdfast.components.train import step
from holdfast.components.train.__main__ import body
from holdfast.launch.interface import Job
from holdfast.steps.adapters import main
from tests.faults.nodes import HELD, HOLDS, PLAIN

_plain = step.training_job


def held_job(*arguments: Any) -> Job:
    """The job of a launch, with HELD for its ranks."""
    job = _plain(*arguments)
    return replace(
        job,
        command=[HELD if word == PLAIN else word for word in job.command],
        environment={**job.environment, HOLDS: os.environ[HOLDS]},
    )


if __name__ == "__main__":
    step.training_job = held_job  # type: ignore[assignment]
    sys.exit(main("train", body))
