"""The WorkflowTemplate: preprocess, train, evaluate, register what was blessed, and notify whatever happened.

It has two ways in: `train`, the DAG itself, and `retrain`, which asks first whether a retraining is due.
"""

from __future__ import annotations

import json
from itertools import pairwise

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

from holdfast.components.spec import Spec, digest, dump_spec
from holdfast.pipelines.backends.argo.pods import STEP_ACCOUNT, image_of, pod_fields, security, tolerations, volumes

TRAIN, RETRAIN, NOTIFY = "train-and-register", "retrain", "notify"
MAX_NAME = 52  # characters of a CronWorkflow's name, which Argo lengthens by a time
SPEC_FILE, OUTPUTS, REPORT = "/holdfast/spec.yaml", "/tmp/outputs", "/tmp/report.html"  # noqa: S108
FAILED_KEPT_SECONDS = 7 * 24 * 3600

# What the cluster did to a pod is tried again, and so is what the table calls retryable; an error of the user is not.
# -1 stands for a pod that went away without a code: evicted, or with its node. A step goes on where it was.
RETRY = 'lastRetry.status == "Error" || asInt(lastRetry.exitCode) < 0 || asInt(lastRetry.exitCode) >= 128'
RETRIES = 20
# `cap` bounds each wait. `maxDuration` would count from the first start, and forbid retries after a long training.
BACKOFF = Backoff(duration="15s", factor=IntOrString(root=2), cap="10m")

PARAMETERS = {
    "spec": "The spec, as YAML.",
    "overrides": 'Fields of the spec to change: a JSON list such as ["training.steps=50"].',
    "store": "Root of the store. Empty takes the spec's, else HOLDFAST_STORE.",
    "salt": "Anything here makes another run of the same inputs.",
}


def workflow_template(
    spec: Spec, *, image: str | None = None, namespace: str | None = None, artifacts: bool = True
) -> WorkflowTemplate:
    """The DAG of `spec`. Its text is the default of the parameter `spec`; where the pods run is decided here.

    `image` replaces the default image of the steps. `namespace`: default, the one it is applied to. `artifacts`: put
    the report, the summary and the logs into the artifact repository of the namespace, which must have one then.
    """
    make = _Steps(spec, image, artifacts)
    cluster = spec.cluster
    values = {"spec": spec_text(spec), "overrides": "[]", "store": "", "salt": ""}
    with WorkflowTemplate(
        name=template_name(spec),
        namespace=namespace,
        labels=labels(),
        annotations={"workflows.argoproj.io/description": "Raw text to a registered language model."},
        entrypoint=TRAIN,
        on_exit=NOTIFY,
        arguments=[Parameter(name=name, value=value, description=PARAMETERS[name]) for name, value in values.items()],
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
        preprocess = make.step("preprocess", outputs={"dataset-id": "dataset_id"})
        train = make.step("train", inputs=["dataset-id"], outputs={"run-id": "run_id"}, salted=True)
        evaluate = make.step(
            "evaluate",
            inputs=["run-id"],
            outputs={"word": "word"},
            arguments=[f"--report={REPORT}"],
            files=[make.artifact("report", REPORT, "report.html")],
        )
        register = make.step("register", inputs=["run-id"], outputs={"version": "version"})
        trigger = make.step("trigger", outputs={"word": "word", "reason": "reason"}, salted=True)
        make.step(
            NOTIFY,
            arguments=["--status={{workflow.status}}", "--failures={{workflow.failures}}"],
            files=[make.artifact("summary", f"{OUTPUTS}/text", "summary.md")],
            salted=True,
        )
        with DAG(name=TRAIN):
            prepared = Task(name="preprocess", template=preprocess)
            trained = Task(name="train", template=train, arguments=_from(prepared, "dataset-id"))
            verdict = Task(name="evaluate", template=evaluate, arguments=_from(trained, "run-id"))
            # Only the word decides. A number can be NaN, and a text can hold a quote: both break conditions.
            registered = Task(
                name="register",
                template=register,
                arguments=_from(trained, "run-id"),
                when="'{{tasks.evaluate.outputs.parameters.word}}' == 'blessed'",
            )
            for before, after in pairwise([prepared, trained, verdict, registered]):
                before.next(after)
        # One at a time: what waited finds nothing new, and ends.
        with DAG(name=RETRAIN, synchronization=Synchronization(mutexes=[Mutex(name=template_name(spec))])):
            decided = Task(name="trigger", template=trigger)
            made = Task(name="run", template=TRAIN, when="'{{tasks.trigger.outputs.parameters.word}}' == 'due'")
            decided.next(made)
    return template


def template_name(spec: Spec) -> str:
    """The name of the spec's WorkflowTemplate and CronWorkflow."""
    name = f"holdfast-{spec.name}"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{digest(name)[:8]}"


def labels() -> dict[str, str]:
    """The labels of everything that Argo makes of a spec."""
    return {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/managed-by": "holdfast"}


def spec_text(spec: Spec) -> str:
    """The spec as a parameter's value. Argo would take `{{` in it for a reference, so such a spec becomes JSON, which
    is YAML as well, and can spell a brace as an escape."""
    text = dump_spec(spec)
    if "{{" not in text:
        return text
    return json.dumps(spec.model_dump(mode="json"), indent=1, ensure_ascii=False).replace("{{", "{\\u007b")


def _from(task: Task, name: str) -> list[Parameter]:
    return [Parameter(name=name, value=f"{{{{tasks.{task.name}.outputs.parameters.{name}}}}}")]


class _Steps:
    """Makes the container templates of one WorkflowTemplate."""

    def __init__(self, spec: Spec, image: str | None, artifacts: bool) -> None:
        self._spec, self._image, self._artifacts = spec, image, artifacts

    def step(
        self,
        name: str,
        *,
        inputs: list[str] | None = None,
        outputs: dict[str, str] | None = None,
        arguments: list[str] | None = None,
        files: list[Artifact] | None = None,
        salted: bool = False,
    ) -> Container:
        """The step `name`: `inputs` become arguments of the same name, `outputs` are read from fields of its result."""
        common = {parameter: f"{{{{workflow.parameters.{parameter}}}}}" for parameter in ("overrides", "store")}
        given = {
            "spec": SPEC_FILE,
            **common,
            "job": "{{workflow.uid}}",
            "outputs": OUTPUTS,
            **({"salt": "{{workflow.parameters.salt}}"} if salted else {}),
            **{parameter: f"{{{{inputs.parameters.{parameter}}}}}" for parameter in inputs or ()},
        }
        return Container(
            name=name,
            image=image_of(name, self._spec, self._image),
            command=["python", "-m", f"holdfast.components.{name}"],
            args=[*(f"--{key}={value}" for key, value in given.items()), *(arguments or ())],
            inputs=[
                RawArtifact(name="spec", path=SPEC_FILE, data="{{workflow.parameters.spec}}"),
                *(Parameter(name=parameter) for parameter in inputs or ()),
            ],
            outputs=[
                *(
                    Parameter(name=parameter, value_from=ValueFrom(path=f"{OUTPUTS}/{field}"))
                    for parameter, field in (outputs or {}).items()
                ),
                *((files or ()) if self._artifacts else ()),
            ],
            retry_strategy=RetryStrategy(limit=RETRIES, retry_policy="Always", expression=RETRY, backoff=BACKOFF),
            **pod_fields(name, self._spec),
        )

    def artifact(self, name: str, path: str, file: str) -> Artifact:
        """A file that goes to the artifact repository, one for each Workflow, as it is: the UI shows it."""
        return S3Artifact(
            name=name,
            path=path,
            key=f"holdfast/{{{{workflow.name}}}}/{file}",
            archive=NoneArchiveStrategy(),
            optional=True,
        )
