"""Entry point of the divide step in a DAG."""

from __future__ import annotations

from holdfast.components.divide import run
from holdfast.spec import Spec
from holdfast.steps import StepResult
from holdfast.store import open_store


def body(spec: Spec, url: str) -> StepResult:
    """Divide the corpus. The result is `Divided`."""
    divided = run(spec, open_store(url))
    return StepResult(divided.model_dump(mode="json"))
