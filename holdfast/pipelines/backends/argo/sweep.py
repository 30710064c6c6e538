"""The sweep DAG of `holdfast.pipelines.trials` as a WorkflowTemplate."""

from __future__ import annotations

from typing import Any

from hera.workflows import DAG, Parameter, Task, WorkflowTemplate

from holdfast.pipelines.backends.argo.check import check
from holdfast.pipelines.backends.argo.template import (
    container_of,
    json_text,
    output_reference,
    parameters_of,
    template_fields,
    template_name,
)
from holdfast.pipelines.backends.sizes import require_fits_argo
from holdfast.pipelines.trials import PARAMETERS, Trials
from holdfast.runtime.outcomes import EXIT_HANDLER
from holdfast.spec import Spec

SWEEP = "sweep"
STEPS = ("preprocess", "train", "evaluate", "compare", "register", EXIT_HANDLER)
# A trial has ended with any result. A trial whose training failed is never evaluated.
ENDED = "({0}.Succeeded || {0}.Failed || {0}.Errored || {0}.Omitted)"


def sweep_objects(
    spec: Spec, trials: Trials, *, at_once: int = 0, image: str | None = None, namespace: str | None = None
) -> list[dict[str, Any]]:
    """The WorkflowTemplate of the trials of `spec`.

    `image` replaces the default image of the steps. `at_once` limits the concurrent pods; 0: no limit.

    The comparison begins when every trial has ended. The evaluations are targets of the DAG. So a Workflow with a
    failed trial becomes Failed once everything else has ended (argoproj/argo-workflows: workflow/controller/dag.go,
    assessDAGPhase).
    """
    with WorkflowTemplate(
        name=template_name(spec, "-sweep"),
        namespace=namespace or spec.cluster.namespace,
        entrypoint=SWEEP,
        on_exit=EXIT_HANDLER,
        arguments=parameters_of(spec, PARAMETERS),
        **template_fields(spec),
    ) as template:
        made = {name: container_of(name, STEPS, spec, image, trials=trials) for name in STEPS}

        def task(step: str, name: str = "", overrides: str = "[]", **inputs: str) -> Task:
            given = {"overrides": overrides, **{key.replace("_", "-"): value for key, value in inputs.items()}}
            arguments = [Parameter(name=key, value=value) for key, value in given.items()]
            return Task(name=name or step, template=made[step], arguments=arguments)

        numbers = range(1, len(trials) + 1)
        ended = [f"evaluate-{number}" for number in numbers]
        with DAG(name=SWEEP, parallelism=at_once or None, fail_fast=False, target=" ".join([*ended, "register"])):
            prepared = task("preprocess")
            dataset = output_reference("preprocess", "dataset_id")
            for number, trial in zip(numbers, trials, strict=True):
                overrides, run = json_text(trial), output_reference(f"train-{number}", "run_id")
                trained = task("train", f"train-{number}", overrides, trial=str(number), dataset_id=dataset)
                evaluated = task("evaluate", f"evaluate-{number}", overrides, trial=str(number), run_id=run)
                prepared.next(trained).next(evaluated)
            compared = task("compare", dataset_id=dataset)
            compared.depends = " && ".join(["preprocess", *(ENDED.format(name) for name in ended)])
            word, winner, changes = (output_reference("compare", name) for name in ("word", "winner", "changes"))
            registered = task("register", overrides=changes, run_id=winner)
            registered.when = f"'{word}' == 'blessed'"
            compared.next(registered)
    found = [template.to_dict()]
    if problems := check(found):
        raise AssertionError("the objects of Argo refer to what is not there:\n" + "\n".join(problems))
    require_fits_argo(found)
    return found
