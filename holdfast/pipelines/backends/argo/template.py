"""The DAG of `holdfast.pipelines.table` as a WorkflowTemplate.

It has two entrypoints: `train`, the DAG itself, and `retrain`, which first checks whether a retraining is due.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hera.workflows import (
    DAG,
    Artifact,
    Container,
    NoneArchiveStrategy,
    Parameter,
    RawArtifact,
    RetryStrategy,
    S3Artifact,
    Task,
    WorkflowTemplate,
)
from hera.workflows.models import (
    Backoff,
    IntOrString,
    LocalObjectReference,
    Metadata,
    Mutex,
    PodGC,
    Synchronization,
    TTLStrategy,
    ValueFrom,
)

from holdfast.pipelines.backends.argo.pods import (
    STEP_ACCOUNT,
    executor_patch,
    pod_fields,
    security,
    tolerations,
    volumes,
)
from holdfast.pipelines.backends.pods import LABELS, require_no_templates
from holdfast.pipelines.table import (
    DESCRIPTION,
    RETRY,
    SCHEDULED_START,
    Edge,
    edges_of,
    inputs_of,
    output_of,
    start_of,
    steps_from,
)
from holdfast.spec import Spec, digest
from holdfast.spec.engine_text import escape
from holdfast.spec.load import dump_written
from holdfast.steps import FIELDS, PARAMETERS, STEPS, TRIAL, parameter_values, producer_of
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.table import FILES

TRAIN, RETRAIN = "train-and-register", "retrain"
TRIALS = "trials"  # a step's input that takes all trials of the sweep
MAX_NAME = 52  # characters of a CronWorkflow's name, to which Argo appends a time
# All in the one writable volume. Where Argo makes no init container, nothing could create another mount point.
SPEC_FILE, OUTPUTS, ARTIFACTS = "/tmp/spec.yaml", "/tmp/outputs", "/tmp/artifacts"  # noqa: S108
FAILED_KEPT_SECONDS = 7 * 24 * 3600

# Retry what the cluster did to a pod, and the retryable codes of the table; not a user's error. -1 stands for a pod
# that disappeared without a code: evicted, or lost with its node.
RETRYABLE = 'lastRetry.status == "Error" || asInt(lastRetry.exitCode) < 0 || asInt(lastRetry.exitCode) >= 128'
# `cap` bounds each wait. `maxDuration` would count from the first start, and forbid retries after a long training.
BACKOFF = Backoff(duration=f"{RETRY.wait}s", factor=IntOrString(root=RETRY.factor), cap=f"{RETRY.longest_wait}s")


def workflow_template(spec: Spec, *, image: str | None = None, namespace: str | None = None) -> WorkflowTemplate:
    """The DAG of `spec`. Its text is the default of the parameter `spec`; the placement of pods is fixed here.

    `image` replaces the default image of the steps. `namespace`: default, the one it is applied to.
    """
    with WorkflowTemplate(
        name=template_name(spec),
        namespace=namespace,
        annotations={"workflows.argoproj.io/description": DESCRIPTION},
        entrypoint=TRAIN,
        on_exit=EXIT_HANDLER,
        arguments=parameters_of(spec, PARAMETERS),
        **template_fields(spec),
    ) as template:
        edges = edges_of(spec)
        names = (*steps_from(SCHEDULED_START, edges), EXIT_HANDLER)
        containers = {name: container_of(name, names, spec, image) for name in names}
        # Limits concurrent pods. It matters only where one step runs many times.
        with DAG(name=TRAIN, parallelism=spec.data.fan_out if any(edge.each for edge in edges) else None):
            _tasks(list(steps_from(start_of(spec), edges)), edges, containers)
        # One at a time. A run that waited finds nothing new and ends.
        with DAG(name=RETRAIN, synchronization=Synchronization(mutexes=[Mutex(name=template_name(spec))])):
            trigger_task = Task(name=SCHEDULED_START, template=containers[SCHEDULED_START])
            (edge,) = (edge for edge in edges if edge.before == SCHEDULED_START)
            trigger_task.next(Task(name="run", template=TRAIN, when=_condition(edge)))
    return template


def parameters_of(spec: Spec, names: Iterable[str]) -> list[Parameter]:
    """The parameters of a template, with their values for `spec`."""
    values = parameter_values(spec)
    parameters = [PARAMETERS[name] for name in names]
    return [
        Parameter(
            name=parameter.name,
            value=text_of(parameter.name, values.get(parameter.name, parameter.default), spec),
            description=parameter.help,
        )
        for parameter in parameters
    ]


def template_fields(spec: Spec) -> dict[str, Any]:
    """The common fields of every WorkflowTemplate of a spec: accounts, security, retention, placement and volumes.

    Raises SpecError for a spec with text that Argo would replace.
    """
    require_no_templates(spec)
    cluster = spec.cluster
    return {
        "labels": labels(),
        "archive_logs": cluster.argo_artifacts or None,
        "service_account_name": STEP_ACCOUNT,
        "security_context": security(),
        "pod_spec_patch": executor_patch(),
        "pod_metadata": Metadata(
            labels={**cluster.steps.labels, **labels()}, annotations=cluster.steps.annotations or None
        ),
        "pod_gc": PodGC(strategy="OnPodCompletion", delete_delay_duration=f"{int(cluster.ttl_minutes * 60)}s"),
        "ttl_strategy": TTLStrategy(
            seconds_after_success=int(cluster.ttl_minutes * 60),
            seconds_after_failure=max(FAILED_KEPT_SECONDS, int(cluster.ttl_minutes * 60)),
        ),
        "node_selector": dict(cluster.steps.node_selector) or None,
        "tolerations": tolerations(cluster.steps.tolerations),
        "image_pull_secrets": [LocalObjectReference(name=name) for name in cluster.pull_secrets] or None,
        "volumes": volumes(spec),
    }


def _tasks(names: Sequence[str], all_edges: Sequence[Edge], made: dict[str, Container]) -> None:
    """Create the tasks of these steps in the active DAG, and their dependencies."""
    tasks: dict[str, Task] = {}
    for name in names:
        edges = [edge for edge in all_edges if edge.after == name and edge.before in tasks]
        arguments = [
            Parameter(name=dashed(input_name), value=output_reference(producer, input_name))
            for input_name in inputs_of(name, tasks)
            if (producer := producer_of(input_name))
        ]
        items = [output_reference(edge.before, STEPS[edge.before].items) for edge in edges if edge.each]
        if items:
            arguments.append(Parameter(name=dashed(STEPS[name].item), value="{{item}}"))
        conditions = [_condition(edge) for edge in edges if edge.when]
        tasks[name] = Task(
            name=name,
            template=made[name],
            arguments=arguments or None,
            when=" && ".join(conditions) or None,
            with_param=items[0] if items else None,
        )
        for edge in edges:
            tasks[edge.before].next(tasks[name])


def _condition(edge: Edge) -> str:
    return f"'{output_reference(edge.before, output_of(edge))}' == '{edge.when}'"


def output_reference(step: str, name: str) -> str:
    """A reference to the output `name` of the task `step`."""
    return f"{{{{tasks.{step}.outputs.parameters.{dashed(name)}}}}}"


def dashed(name: str) -> str:
    """A name with dashes, as Argo's objects use it."""
    return name.replace("_", "-")


def container_of(
    name: str, names: Sequence[str], spec: Spec, image: str | None, *, trials: Sequence[Sequence[str]] = ()
) -> Container:
    """The template of a step.

    DAG parameters and outputs of earlier steps become arguments. Fields of the result become outputs. Documents go to
    the artifact repository if the spec has one. `names`: all steps of the DAG. In a sweep, the `trials` are compiled
    in, the overrides are an input, and no field of the spec is a parameter.
    """
    step = STEPS[name]
    inputs = [
        dashed(input_name)
        for input_name in inputs_of(name, names)
        if input_name not in PARAMETERS and input_name != TRIALS
    ]
    if trials and name != EXIT_HANDLER:
        inputs += ["overrides", *((TRIAL,) if step.per_trial else ())]
    dag_parameters = ("store",) if trials else ("overrides", "store", *FIELDS)
    arguments = {
        "spec": SPEC_FILE,
        **{dashed(field): f"{{{{workflow.parameters.{field}}}}}" for field in dag_parameters},
        **({} if trials else {"compiled": json_text(parameter_values(spec))}),
        "job": "{{workflow.uid}}",
        "outputs": OUTPUTS,
        **{
            input_name: f"{{{{workflow.parameters.{input_name}}}}}"
            for input_name in step.inputs
            if input_name in PARAMETERS
        },
        **{input_name: f"{{{{inputs.parameters.{input_name}}}}}" for input_name in inputs},
        **({TRIALS: json_text(trials)} if trials and TRIALS in step.inputs else {}),
    }
    if name == EXIT_HANDLER:
        arguments |= {"status": "{{workflow.status}}", "failures": "{{workflow.failures}}"}
    artifact_kinds = step.artifacts if spec.cluster.argo_artifacts else {}
    documents = [_artifact(artifact, FILES[kind]) for artifact, kind in artifact_kinds.items() if kind in FILES]
    if documents:
        arguments["artifacts"] = ARTIFACTS
    return Container(
        name=name,
        command=["python", "-m", f"holdfast.components.{name}"],
        args=["--escaped", *(f"--{key}={value}" for key, value in arguments.items())],
        inputs=[
            RawArtifact(name="spec", path=SPEC_FILE, data="{{workflow.parameters.spec}}"),
            *(Parameter(name=input_name) for input_name in inputs),
        ],
        outputs=[
            *(
                Parameter(name=dashed(output), value_from=ValueFrom(path=f"{OUTPUTS}/{output}"))
                for output in step.outputs
            ),
            *documents,
        ],
        retry_strategy=RetryStrategy(limit=RETRY.tries, retry_policy="Always", expression=RETRYABLE, backoff=BACKOFF),
        **pod_fields(step, spec, image),
    )


def _artifact(name: str, ending: str) -> Artifact:
    """A file for the artifact repository, one for each Workflow, uncompressed so that the UI shows it."""
    return S3Artifact(
        name=name,
        path=f"{ARTIFACTS}/{name}",
        key=f"holdfast/{{{{workflow.name}}}}/{name}.{ending}",
        archive=NoneArchiveStrategy(),
        optional=True,
    )


def text_of(name: str, value: object, spec: Spec) -> str:
    """The value of a parameter as escaped text. Argo's parameters are all text."""
    return escape(dump_written(spec) if name == "spec" else value if isinstance(value, str) else json.dumps(value))


def json_text(value: object) -> str:
    """A value as JSON, escaped for Argo."""
    return escape(json.dumps(value))


def template_name(spec: Spec, ending: str = "") -> str:
    """The name of the spec's WorkflowTemplate and CronWorkflow."""
    return template_called(spec.name + ending)


def template_called(family: str) -> str:
    """The name of the WorkflowTemplate for runs of one spec name, or for a sweep."""
    name = f"holdfast-{family}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{digest(name)[:8]}"


def labels() -> dict[str, str]:
    """The labels of everything that Argo makes from a spec."""
    return {**LABELS, "app.kubernetes.io/managed-by": "holdfast"}
