"""The DAG of `holdfast.pipelines.training` as a WorkflowTemplate.

It has two ways in: `train`, the DAG itself, and `retrain`, which asks first whether a retraining is due.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

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

from holdfast.components.runtime.outcomes import EXIT_HANDLER
from holdfast.components.spec import Spec, digest, dump_spec
from holdfast.components.steps import PARAMETERS, STEPS, giver_of
from holdfast.components.steps.table import FILES
from holdfast.pipelines.backends.argo.pods import STEP_ACCOUNT, pod_fields, security, tolerations, volumes
from holdfast.pipelines.backends.pods import LABELS
from holdfast.pipelines.training import (
    DESCRIPTION,
    EDGES,
    RETRY,
    SCHEDULED_START,
    START,
    Edge,
    from_here,
    output_of,
)

TRAIN, RETRAIN = "train-and-register", "retrain"
MAX_NAME = 52  # characters of a CronWorkflow's name, which Argo lengthens by a time
# All in the one volume that may be written to: where Argo makes no init container, nobody could make a mount point.
SPEC_FILE, OUTPUTS, ARTIFACTS = "/tmp/spec.yaml", "/tmp/outputs", "/tmp/artifacts"  # noqa: S108
FAILED_KEPT_SECONDS = 7 * 24 * 3600

# What the cluster did to a pod is tried again, and so is what the table calls retryable; an error of the user is not.
# -1 stands for a pod that went away without a code: evicted, or with its node.
RETRYABLE = 'lastRetry.status == "Error" || asInt(lastRetry.exitCode) < 0 || asInt(lastRetry.exitCode) >= 128'
# `cap` bounds each wait. `maxDuration` would count from the first start, and forbid retries after a long training.
BACKOFF = Backoff(duration=f"{RETRY.wait}s", factor=IntOrString(root=RETRY.factor), cap=f"{RETRY.longest_wait}s")


def workflow_template(
    spec: Spec, *, image: str | None = None, namespace: str | None = None, artifacts: bool = True
) -> WorkflowTemplate:
    """The DAG of `spec`. Its text is the default of the parameter `spec`; where the pods run is decided here.

    `image` replaces the default image of the steps. `namespace`: default, the one it is applied to. `artifacts`: put
    the report, the summary and the logs into the artifact repository of the namespace, which must have one then.
    """
    cluster = spec.cluster
    with WorkflowTemplate(
        name=template_name(spec),
        namespace=namespace,
        labels=labels(),
        annotations={"workflows.argoproj.io/description": DESCRIPTION},
        entrypoint=TRAIN,
        on_exit=EXIT_HANDLER,
        arguments=[
            Parameter(name=one.name, value=text_of(one.name, one.default, spec), description=one.help)
            for one in PARAMETERS.values()
        ],
        archive_logs=artifacts or None,
        service_account_name=STEP_ACCOUNT,
        security_context=security(),
        pod_metadata=Metadata(labels=labels()),
        pod_gc=PodGC(strategy="OnPodCompletion", delete_delay_duration=f"{int(cluster.keep_minutes * 60)}s"),
        ttl_strategy=TTLStrategy(
            seconds_after_success=int(cluster.keep_minutes * 60),
            seconds_after_failure=max(FAILED_KEPT_SECONDS, int(cluster.keep_minutes * 60)),
        ),
        node_selector=dict(cluster.node_selector) or None,
        tolerations=tolerations(spec),
        image_pull_secrets=[LocalObjectReference(name=name) for name in cluster.pull_secrets] or None,
        volumes=volumes(spec),
    ) as template:
        made = {name: _container(name, spec, image, artifacts) for name in (*from_here(SCHEDULED_START), EXIT_HANDLER)}
        with DAG(name=TRAIN):
            _tasks(list(from_here(START)), made)
        # One at a time: what waited finds nothing new, and ends.
        with DAG(name=RETRAIN, synchronization=Synchronization(mutexes=[Mutex(name=template_name(spec))])):
            asked = Task(name=SCHEDULED_START, template=made[SCHEDULED_START])
            (edge,) = (edge for edge in EDGES if edge.after == START)
            asked.next(Task(name="run", template=TRAIN, when=_condition(edge)))
    return template


def _tasks(names: Sequence[str], made: dict[str, Container]) -> None:
    """The tasks of a DAG with these steps, and what each waits for."""
    tasks = {}
    for name in names:
        edges = [edge for edge in EDGES if edge.after == name and edge.before in tasks]
        given = [
            Parameter(name=_dashed(one), value=_output(giver, one))
            for one in STEPS[name].inputs
            if (giver := giver_of(one))
        ]
        conditions = [_condition(edge) for edge in edges if edge.when]
        tasks[name] = Task(
            name=name, template=made[name], arguments=given or None, when=" && ".join(conditions) or None
        )
        for edge in edges:
            tasks[edge.before].next(tasks[name])


def _condition(edge: Edge) -> str:
    return f"'{_output(edge.before, output_of(edge))}' == '{edge.when}'"


def _output(step: str, name: str) -> str:
    return f"{{{{tasks.{step}.outputs.parameters.{_dashed(name)}}}}}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _container(name: str, spec: Spec, image: str | None, artifacts: bool) -> Container:
    """The template of a step: DAG parameters and outputs of earlier steps become arguments, fields of its result
    become outputs, its documents go to the artifact repository."""
    step = STEPS[name]
    inputs = [_dashed(one) for one in step.inputs if giver_of(one)]
    arguments = {
        "spec": SPEC_FILE,
        **{one: f"{{{{workflow.parameters.{one}}}}}" for one in ("overrides", "store")},
        "job": "{{workflow.uid}}",
        "outputs": OUTPUTS,
        **{one: f"{{{{workflow.parameters.{one}}}}}" for one in step.inputs if not giver_of(one)},
        **{one: f"{{{{inputs.parameters.{one}}}}}" for one in inputs},
    }
    if name == EXIT_HANDLER:
        arguments |= {"status": "{{workflow.status}}", "failures": "{{workflow.failures}}"}
    documents = [_artifact(one, FILES[kind]) for one, kind in step.artifacts.items() if artifacts and kind in FILES]
    if documents:
        arguments["artifacts"] = ARTIFACTS
    return Container(
        name=name,
        command=["python", "-m", f"holdfast.components.{name}"],
        args=[f"--{key}={value}" for key, value in arguments.items()],
        inputs=[
            RawArtifact(name="spec", path=SPEC_FILE, data="{{workflow.parameters.spec}}"),
            *(Parameter(name=one) for one in inputs),
        ],
        outputs=[
            *(Parameter(name=_dashed(one), value_from=ValueFrom(path=f"{OUTPUTS}/{one}")) for one in step.outputs),
            *documents,
        ],
        retry_strategy=RetryStrategy(limit=RETRY.tries, retry_policy="Always", expression=RETRYABLE, backoff=BACKOFF),
        **pod_fields(step, spec, image),
    )


def _artifact(name: str, ending: str) -> Artifact:
    """A file that goes to the artifact repository, one for each Workflow, as it is: the UI shows it."""
    return S3Artifact(
        name=name,
        path=f"{ARTIFACTS}/{name}",
        key=f"holdfast/{{{{workflow.name}}}}/{name}.{ending}",
        archive=NoneArchiveStrategy(),
        optional=True,
    )


def text_of(name: str, value: object, spec: Spec) -> str:
    """The value of a parameter as a text, which every parameter is on Argo."""
    return spec_text(spec) if name == "spec" else value if isinstance(value, str) else json.dumps(value)


def template_name(spec: Spec) -> str:
    """The name of the spec's WorkflowTemplate and CronWorkflow."""
    name = f"holdfast-{spec.name}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{digest(name)[:8]}"


def labels() -> dict[str, str]:
    """The labels of everything that Argo makes of a spec."""
    return {**LABELS, "app.kubernetes.io/managed-by": "holdfast"}


def spec_text(spec: Spec) -> str:
    """The spec as a parameter's value. Argo would take `{{` in it for a reference, so such a spec becomes JSON, which
    is YAML as well, and can spell a brace as an escape."""
    text = dump_spec(spec)
    if "{{" not in text:
        return text
    return json.dumps(spec.model_dump(mode="json"), indent=1, ensure_ascii=False).replace("{{", "{\\u007b")
