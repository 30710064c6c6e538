"""The train step with ranks of `sick`. HOLDFAST_TEST_SICK gives a rank and its fault, as there."""

import os
import sys
from dataclasses import replace
from typing import Any

from holdfast.components.train import step
from holdfast.components.train.__main__ import body
from holdfast.launch.interface import Job
from holdfast.rank import worker
from holdfast.steps.adapters import main as step_main
from tests.health import sick

PLAIN, SICK = "holdfast.rank.worker", "tests.health.sick_train"
_plain = step.training_job


def sick_job(*arguments: Any) -> Job:
    """The job of a launch, with SICK for its ranks."""
    job = _plain(*arguments)
    return replace(job, command=[SICK if word == PLAIN else word for word in job.command])


def main() -> None:
    """A rank: see `worker.main`."""
    rank, _, defect = os.environ["HOLDFAST_TEST_SICK"].partition(":")
    is_sick = os.environ["RANK"] == rank
    sick.by_looks(sick.SLOW if is_sick and defect == "slow" else sick.SOUND)
    worker.main()


if __name__ == "__main__":
    step.training_job = sick_job  # type: ignore[assignment]
    sys.exit(step_main("train", body))
