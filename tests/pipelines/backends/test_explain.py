"""Details that the records of a run add to the rows of its engine, on every engine."""

from holdfast.pipelines.backends.explain import Known, explained
from holdfast.pipelines.backends.interface import FAILED, NOT_BEGUN, RunStatus, StepStatus


def test_a_trial_that_never_began_keeps_its_number() -> None:
    names = ("train-1", "evaluate-1", "train-2", "evaluate-2")
    steps = (StepStatus("preprocess", FAILED), *(StepStatus(name, NOT_BEGUN) for name in names))
    run_status = explained(RunStatus("argo", "wf-1", "small-sweep", FAILED, steps=steps), Known())
    assert [(step.name, step.state) for step in run_status.steps[1:]] == [
        *((name, NOT_BEGUN) for name in names), ("compare", NOT_BEGUN), ("register", NOT_BEGUN),
    ]  # fmt: skip
