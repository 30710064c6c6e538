"""Argo objects of a spec for `kubectl apply`: the WorkflowTemplate, and the CronWorkflow if there is a schedule.

The same spec gives the same bytes, and the objects have passed `check`.
"""

from typing import Any

from hera.workflows import DAG, CronWorkflow, Parameter, Task, WorkflowTemplate
from hera.workflows.models import WorkflowTemplateRef

from holdfast.pipelines.backends.argo.check import check
from holdfast.pipelines.backends.argo.template import (
    RETRAIN,
    container_of,
    json_text,
    labels,
    output_reference,
    parameters_of,
    template_fields,
    template_name,
    workflow_template,
)
from holdfast.pipelines.backends.sizes import require_fits_argo
from holdfast.pipelines.documents import as_yaml
from holdfast.pipelines.table import SCRIPT_START, SWEEP_EDGES, steps_from
from holdfast.pipelines.trials import PARAMETERS, Trials
from holdfast.spec import Spec
from holdfast.spec.cron import expand
from holdfast.spec.errors import Problem, SpecError
from holdfast.steps.outcomes import EXIT_HANDLER

HEADER = "# Compiled by Holdfast from the spec `{name}`, for Argo Workflows.\n"


def argo_objects(spec: Spec, *, image: str | None = None, namespace: str | None = None) -> list[dict[str, Any]]:
    """The objects of `spec`, in the order in which to apply them. See `workflow_template` for the arguments."""
    namespace = namespace or spec.cluster.namespace
    objects = [workflow_template(spec, image=image, namespace=namespace).to_dict()]
    if spec.schedule.cron is not None or spec.schedule.every_minutes is not None:
        objects.append(cron_workflow(spec, namespace=namespace).to_dict())
    if problems := check(objects):
        raise AssertionError("the objects of Argo refer to what is not there:\n" + "\n".join(problems))
    require_fits_argo(objects)
    return objects


def argo_text(spec: Spec, *, image: str | None = None, namespace: str | None = None) -> str:
    """The objects of `spec` as YAML for kubectl."""
    objects = argo_objects(spec, image=image, namespace=namespace)
    return HEADER.format(name=spec.name) + as_yaml(*objects)


# The CronWorkflow of a spec with a `schedule` section.
#
# It names the WorkflowTemplate and its entrypoint `retrain`. So a new template affects the next run and none in flight.

HOUR, DAY = 60, 24 * 60  # minutes
KEPT = 3  # ended Workflows of each kind


def cron_workflow(spec: Spec, *, namespace: str | None = None) -> CronWorkflow:
    """The CronWorkflow of `spec`. Runs never overlap, and a run past its starting deadline is skipped.

    Raises SpecError when the spec has no schedule.
    """
    return CronWorkflow(
        name=template_name(spec),
        namespace=namespace,
        labels=labels(),
        schedules=schedules(spec),
        timezone=spec.schedule.timezone,
        concurrency_policy="Forbid",
        starting_deadline_seconds=spec.schedule.starting_deadline_seconds,
        successful_jobs_history_limit=KEPT,
        failed_jobs_history_limit=KEPT,
        workflow_template_ref=WorkflowTemplateRef(name=template_name(spec)),
        entrypoint=RETRAIN,
    )


def schedules(spec: Spec) -> list[str]:
    """The schedule as cron expressions; `@every` for an interval that does not divide an hour or a day."""
    schedule = spec.schedule
    if schedule.cron is not None:
        return [expand(schedule.cron)]
    minutes = schedule.every_minutes
    if minutes is None:
        remedy = "write schedule.cron: '0 3 * * 1', or schedule.every_minutes: 60"
        raise SpecError([Problem("schedule", None, "says neither cron nor every_minutes", remedy)])
    if minutes < HOUR and HOUR % minutes == 0:
        return [f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"]
    if minutes % HOUR == 0 and DAY % minutes == 0:
        return [
            f"0 */{minutes // HOUR} * * *" if HOUR < minutes < DAY else "0 * * * *" if minutes == HOUR else "0 0 * * *"
        ]
    return [f"@every {minutes}m"]


# The sweep DAG of `holdfast.pipelines.trials` as a WorkflowTemplate.

SWEEP = "sweep"
STEPS = ("preprocess", "train", "evaluate", "compare", "register", EXIT_HANDLER)
# A trial has ended with any result. A trial whose training failed is never evaluated.
ENDED = "({0}.Succeeded || {0}.Failed || {0}.Errored || {0}.Omitted)"


def sweep_objects(
    spec: Spec, trials: Trials, *, concurrent_trials: int = 0, image: str | None = None, namespace: str | None = None
) -> list[dict[str, Any]]:
    """The WorkflowTemplate of the trials of `spec`.

    `image` replaces the default image of the steps. `concurrent_trials` limits the concurrent pods; 0: no limit.

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
        has_data = bool(spec.data.sources)
        names = list(STEPS) if has_data else [*steps_from(SCRIPT_START, SWEEP_EDGES), EXIT_HANDLER]
        containers = {name: container_of(name, names, spec, image, trials=trials) for name in names}

        def task(step: str, name: str = "", overrides: str = "[]", **inputs: str) -> Task:
            named_values = {"overrides": overrides, **{key.replace("_", "-"): value for key, value in inputs.items()}}
            arguments = [Parameter(name=key, value=value) for key, value in named_values.items()]
            return Task(name=name or step, template=containers[step], arguments=arguments)

        numbers = range(1, len(trials) + 1)
        ended = [f"evaluate-{number}" for number in numbers]
        with DAG(
            name=SWEEP, parallelism=concurrent_trials or None, fail_fast=False, target=" ".join([*ended, "register"])
        ):
            prepared = task("preprocess") if has_data else None
            dataset = {"dataset_id": output_reference("preprocess", "dataset_id")} if has_data else {}
            for number, trial in zip(numbers, trials, strict=True):
                overrides, run = json_text(trial), output_reference(f"train-{number}", "run_id")
                trained = task("train", f"train-{number}", overrides, trial=str(number), **dataset)
                evaluated = task("evaluate", f"evaluate-{number}", overrides, trial=str(number), run_id=run)
                if prepared is not None:
                    prepared.next(trained)
                trained.next(evaluated)
            compared = task("compare", **dataset)
            needed = [prepared.name] if prepared is not None else []
            compared.depends = " && ".join([*needed, *(ENDED.format(name) for name in ended)])
            word, winner, changes = (output_reference("compare", name) for name in ("word", "winner", "changes"))
            registered = task("register", overrides=changes, run_id=winner)
            registered.when = f"'{word}' == 'blessed'"
            compared.next(registered)
    objects = [template.to_dict()]
    if problems := check(objects):
        raise AssertionError("the objects of Argo refer to what is not there:\n" + "\n".join(problems))
    require_fits_argo(objects)
    return objects
