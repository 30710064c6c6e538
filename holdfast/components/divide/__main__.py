"""`python -m holdfast.components.divide --spec SPEC`: divides the corpus of a spec among workers."""

import sys

from holdfast.components.divide import run
from holdfast.spec import Spec
from holdfast.steps import StepResult
from holdfast.steps.adapters import main
from holdfast.store import open_store

# Entry point of the divide step in a DAG.


def body(spec: Spec, url: str) -> StepResult:
    """Divide the corpus. The result is `Divided`."""
    divided = run(spec, open_store(url))
    return StepResult(divided.model_dump(mode="json"))


if __name__ == "__main__":
    sys.exit(main("divide", body))
