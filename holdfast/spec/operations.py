"""The `evaluation`, `registration` and `schedule` sections: what happens before and after training."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from holdfast.spec.cluster import LabelKey, LabelValue, NamespaceName, ObjectName, Quantity, Toleration
from holdfast.spec.functions import USE, Function
from holdfast.spec.section import Section, runtime_field

# A name that MLflow accepts, and that can be parsed from `holdfast models generate NAME@ALIAS` and `NAME/VERSION`.
RegistryName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_. -]{0,198}[A-Za-z0-9_])?$")]


MetricName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_./ -]{0,98}[A-Za-z0-9_])?$")]


class Task(Section):
    """A downstream task: a file in the format of lm-evaluation-harness, with its data files in the same folder."""

    uri: str = runtime_field(
        ..., "The task file: a path, or a key such as `s3://bucket/tasks/arithmetic.yaml`.", min_length=1
    )
    metric: str = runtime_field("acc", "The metric of the task that counts.", min_length=1)
    bound: float | None = runtime_field(None, "Bless only if the metric has this value or a better one.")
    champion_tolerance: float | None = runtime_field(
        None, "Bless only if the metric is at most this much worse than that of the champion.", ge=0
    )
    shots: int = runtime_field(0, "Solved examples before each question.", ge=0, le=100)
    examples: int | None = runtime_field(None, "Number of questions, from the first. Default: all.", ge=1)
    filter: str | None = runtime_field(
        None, "The filter of the task file (`filter_list`) whose answers count. Default: the last one.", min_length=1
    )
    chat_template: bool = runtime_field(
        False, "Ask through the model's chat template: the question is a user turn, the answer an assistant turn."
    )
    system: str | None = runtime_field(
        None, "The system message, before a `description` of the task file. Needs `chat_template`.", min_length=1
    )
    fewshot_as_multiturn: bool = runtime_field(
        True, "With `chat_template`: solved examples are turns. If false, they are in the turn of the question."
    )
    while_training: bool = runtime_field(False, "Also score the task after each multiple of `evaluation.every_steps`.")

    @property
    def question(self) -> dict[str, object]:
        """How the model is asked, other than by the task file and `shots`. Empty by default."""
        asked: dict[str, object] = {} if self.filter is None else {"filter": self.filter}
        if self.chat_template:
            asked |= {"system": self.system, "fewshot_as_multiturn": self.fewshot_as_multiturn}
        return asked


class Metric(Function):
    """A metric of your own, and its conditions. Give `use`: a function of the model and the held-out batches (tokens,
    targets, counted) that returns a number. Or give only `name`: a number that `evaluation.command` writes. Keys that
    are no fields are passed to the function by name. See docs/your-own-code.md."""

    use: str | None = runtime_field(  # type: ignore[assignment]
        None,
        "The function: a Python file, relative to the folder of the spec, and the name of a function in it.",
        pattern=USE,
    )
    name: MetricName | None = runtime_field(
        None, "Name of the metric. Default: the name of the function. Without `use`: a name of the command's file."
    )
    at_least: float | None = runtime_field(None, "Bless only a model with this value or a higher one.")
    at_most: float | None = runtime_field(None, "Bless only a model with this value or a lower one.")
    versus_champion: Literal["ignore", "not_worse", "better"] = runtime_field(
        "ignore", "Required comparison with the champion, by the same function on the same text."
    )
    higher_is_better: bool = runtime_field(True, "Whether a higher value is better (`versus_champion`).")
    tolerance: float = runtime_field(0.0, "`not_worse` allows a value that is this much worse.", ge=0)

    @classmethod
    def _of_text(cls, value: str) -> dict[str, object]:
        return {"use": value} if ":" in value else {"name": value}

    @property
    def label(self) -> str:
        """The name of the metric in verdicts."""
        return self.name or (self.function_name if self.use else "")


class Evaluation(Section):
    """What is measured on the held-out split, and the conditions that a model must meet to be blessed."""

    max_tokens: int = runtime_field(
        500_000, "Maximum number of held-out tokens to score, the same ones for every model.", ge=1
    )
    max_loss: float | None = runtime_field(None, "Bless only below this mean loss, in nats per token.", gt=0)
    max_perplexity: float | None = runtime_field(None, "Bless only below this perplexity.", gt=1)
    max_bits_per_byte: float | None = runtime_field(None, "Bless only below this many bits per byte of text.", gt=0)
    command: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = runtime_field(
        (),
        "A command that scores an export, such as `[python, score.py]`. It runs in the folder of your code. "
        "HOLDFAST_EXPORT names the folder of the exported model, and HOLDFAST_METRICS the file for its result: a JSON "
        "object of names and numbers. See docs/your-own-code.md.",
        max_length=1000,
    )
    timeout_minutes: float = runtime_field(
        1440.0,
        "Time limit of `command` for one export, in minutes. Then its process group is killed, and the step fails with "
        "code 22, which is not tried again.",
        gt=0,
        le=10_080,
    )
    load: Function | None = Field(
        None,
        description="With `train.script`: a function of the folder of an export that returns the model for `metrics`.",
        json_schema_extra={"role": "neither"},
    )
    max_prompts: int = runtime_field(
        256, "With data.kind: prompts: maximum number of held-out prompts to answer.", ge=1
    )
    answers: int = runtime_field(
        1, "With data.kind: prompts: sampled answers to each prompt, the k of pass@k.", ge=1, le=1024
    )
    solved_reward: float = runtime_field(
        1.0, "With data.kind: prompts: an answer with at least this reward solves its prompt."
    )
    min_pass_at_1: float | None = runtime_field(
        None, "Bless only if at least this share of the answers solve their prompt.", ge=0, le=1
    )
    min_pass_at_k: float | None = runtime_field(
        None, "Bless only if at least this share of the prompts is solved by one of `answers`.", ge=0, le=1
    )
    metrics: tuple[Metric, ...] = runtime_field((), "Metrics of your own.", max_length=16)
    versus_champion: Literal["not_worse", "better", "ignore"] = runtime_field(
        "not_worse", "Required comparison with the champion on the same held-out data, in bits per byte."
    )
    champion_tolerance: float = runtime_field(
        0.0,
        "`not_worse` allows this much more bits per byte than the champion, as a fraction of its value.",
        ge=0,
        lt=1,
    )
    unscorable_champion: Literal["refuse", "ignore"] = runtime_field(
        "refuse",
        "What happens if the champion cannot be scored: its exported model is missing or damaged, or cannot read the "
        "text. `refuse` ends the step with code 8. `ignore` judges the model without a comparison.",
    )
    prompts: tuple[str, ...] = runtime_field((), "Prompts to continue in the report.", max_length=50)
    sample_tokens: int = runtime_field(64, "Length of each continuation, in tokens.", ge=1, le=4096)
    temperature: float = runtime_field(0.8, "Sampling temperature; 0 always takes the most likely token.", ge=0, le=10)
    tasks: tuple[Task, ...] = runtime_field((), "Downstream tasks to score.", max_length=100)
    every_steps: int | None = runtime_field(
        None,
        "Also measure the held-out loss while training, after each multiple of this many steps. Each of these steps is "
        "saved as a checkpoint. Default: never.",
        ge=1,
        le=10**9,
    )
    keep_best: bool = Field(
        False,
        description="Pin the checkpoint with the lowest held-out loss among those measured at `every_steps`. It is "
        "exported, judged and registered instead of the last one.",
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="End training after this many consecutive evaluations at `every_steps` without a lower loss.",
    )

    @property
    def decides(self) -> bool:
        """Whether evaluations while training decide which state the run ends with."""
        return self.keep_best or self.stop_after is not None


class Registration(Section):
    """Registration of the model."""

    model: RegistryName | None = runtime_field(None, "Name of the registered model. Default: the spec's name.")
    experiment: str | None = runtime_field(
        None, "MLflow experiment. Default: the spec's name.", min_length=1, max_length=200
    )
    serve: Function | None = Field(
        None,
        description="With `train.script`: a class that serves the exported model in MLflow. It is created with the "
        "folder of the export, and its method `predict` gets the input. See docs/your-own-code.md.",
        json_schema_extra={"role": "neither"},
    )
    license: str | None = runtime_field(
        None,
        "Licence of the model, as an SPDX expression such as `Apache-2.0`. It is in the model card and the bill of "
        "materials of each version.",
        pattern=r"^[A-Za-z0-9.+() -]{1,200}$",
    )
    promote: bool = runtime_field(
        True, "Move the `champion` alias to a blessed model. If false, it becomes `challenger`."
    )
    trusted_stores: tuple[str, ...] = runtime_field(
        (),
        "Other stores (URLs) whose registrations also count. A champion from one of them is used for comparison and "
        "served. A version from any further store is foreign, and is not used.",
        max_length=10,
    )


MINUTES_A_YEAR = 365 * 24 * 60


class Retraining(Section):
    """When the pipeline runs on a schedule, and when a retraining is due.

    Without a champion, a retraining is always due. With the data and spec of the champion it is never due, because the
    result would be the same model.
    """

    cron: str | None = runtime_field(
        None,
        "Cron expression: minute, hour, day of the month, month, weekday. Each field takes numbers, names (jan-dec, "
        "sun-sat), and lists, ranges and steps of them.",
        max_length=200,
    )
    every_minutes: int | None = runtime_field(
        None, "Interval between two runs, in minutes, at most a year.", ge=1, le=MINUTES_A_YEAR
    )
    timezone: str = runtime_field("UTC", "IANA time zone of `cron`.")
    starting_deadline_seconds: int = runtime_field(
        600, "A run that cannot start within this time is skipped, in seconds.", ge=0, le=31_536_000
    )
    on_new_data: bool = runtime_field(
        True, "Retrain if the sources give a different dataset from the one that the champion was trained on."
    )
    on_changed_spec: bool = runtime_field(
        True, "Retrain if the spec would give a different model from the champion's dataset."
    )
    max_age_hours: float | None = runtime_field(
        None, "Retrain a champion that was registered this many hours ago, if anything changed since then.", gt=0
    )
    max_decay: float | None = runtime_field(
        None,
        "Retrain if the champion needs this much more bits per byte than when it was blessed, as a fraction. It is "
        "scored on the held-out text of the current sources.",
        ge=0,
    )


# The `serving` section: where a registered model is served and listed outside MLflow. Without it: nowhere.

# The pattern of KServe's own webhook.
ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,51}[a-z0-9])?$")]


class VllmServer(Section):
    """A server of vLLM, with OpenAI's HTTP API."""

    image: str = runtime_field(
        ...,
        "Image of the server, such as `docker.io/vllm/vllm-openai@sha256:…`. Name it by digest, so that all pods run "
        "the same one.",
        pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,500}$",
    )
    startup_minutes: int = runtime_field(30, "Time to load the model, before a pod is restarted.", ge=1, le=24 * 60)
    shared_memory: Quantity = runtime_field("2Gi", "Size of /dev/shm, as a Kubernetes quantity. It counts as memory.")


class ServingPods(Section):
    """The pods that serve a champion."""

    name: ServiceName | None = runtime_field(None, "Name of the object. Default: the spec's name.")
    namespace: NamespaceName | None = runtime_field(None, "Its namespace. Default: the namespace of the pipeline run.")
    service_account: ObjectName | None = runtime_field(
        None,
        "Service account with access to the bucket, by its Secrets or cloud identity. Default: the default account.",
    )
    cpu: Quantity = runtime_field("2", "CPU cores of each pod, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("8Gi", "Memory of each pod, as a Kubernetes quantity.")
    accelerators: int = runtime_field(0, "Accelerators of each pod, of the kind `cluster.accelerator`.", ge=0, le=64)
    arguments: tuple[str, ...] = runtime_field(
        (), "Additional arguments of the runtime, such as `--dtype=bfloat16`.", max_length=64
    )
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the nodes must have.")
    tolerations: tuple[Toleration, ...] = runtime_field((), "Taints that the pods accept.", max_length=64)
    labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the object.")
    annotations: dict[LabelKey, str] = runtime_field(
        {}, "Annotations of the object, such as the deployment mode of an InferenceService."
    )


class Kserve(ServingPods):
    """An InferenceService of KServe that serves the champion from the store, with KServe's Hugging Face runtime or with
    vLLM. Without this section none is created."""

    runtime: ObjectName | None = runtime_field(
        None, "ServingRuntime or ClusterServingRuntime. Default: KServe chooses one for Hugging Face models."
    )
    vllm: VllmServer | None = Field(
        None,
        description="Serve with this server of vLLM, and not with a runtime of KServe.",
        json_schema_extra={"role": "neither"},
    )
    min_replicas: int = runtime_field(
        1, "Minimum number of pods; 0 allows scale to zero, if KServe supports it.", ge=0, le=10_000
    )
    max_replicas: int = runtime_field(1, "Maximum number of pods.", ge=1, le=10_000)


class Deployment(ServingPods):
    """A Deployment and a Service that serve the champion with vLLM, without KServe. Before the server starts, an init
    container downloads the export and checks each byte by its digest. Without this section none is created."""

    vllm: VllmServer = Field(..., description="The server.", json_schema_extra={"role": "neither"})
    image: str | None = runtime_field(
        None,
        "Image of Holdfast for the download. Default: `cluster.image`.",
        pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,500}$",
    )
    replicas: int | None = runtime_field(1, "Number of pods; null leaves it to an autoscaler.", ge=0, le=10_000)
    secret: ObjectName | None = runtime_field(
        None,
        "Secret with the environment of the download: access to the bucket, such as AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL.",
    )
    key_secret: ObjectName | None = runtime_field(
        None, "Secret whose key `api-key` clients must send. Default: all clients that reach the Service are answered."
    )


class ModelRegistry(Section):
    """An entry in a Kubeflow Model Registry for every registered version. Without this section none is created. If the
    registry requires a token, set MODEL_REGISTRY_TOKEN, and MODEL_REGISTRY_TOKEN_FOR to the server (such as
    https://registry.example). The token is sent to that server only."""

    url: str = runtime_field(
        ...,
        "Root of the registry's REST API, such as http://model-registry-service.kubeflow.svc:8080.",
        pattern=r"^https?://[^/?#]{1,253}(/[^?#]{0,500})?$",
    )
    author: str = runtime_field("holdfast", "Author of the versions.", min_length=1, max_length=200)


class Serving(Section):
    """What happens to a registered model outside MLflow."""

    kserve: Kserve | None = Field(
        None, description="How the champion is served.", json_schema_extra={"role": "neither"}
    )
    deployment: Deployment | None = Field(
        None, description="How the champion is served without KServe.", json_schema_extra={"role": "neither"}
    )
    model_registry: ModelRegistry | None = Field(
        None, description="The registry that lists the versions.", json_schema_extra={"role": "neither"}
    )


# The `telemetry` section: metrics of a training run.


class Telemetry(Section):
    """Metrics of a training run, and where they are served."""

    trackers: tuple[Literal["mlflow", "wandb", "trackio"], ...] = runtime_field(
        ("mlflow",),
        "Where the metrics are copied to, from the committed history in the store: MLflow, Weights & Biases, Trackio. "
        "An empty list copies them nowhere. See docs/tracking.md.",
        max_length=3,
    )

    observers: tuple[Function, ...] = runtime_field(
        (),
        "Your own observers: functions of a step and its metrics by name, which rank 0 calls after each step. One that "
        "fails is left out, and the training continues.",
        max_length=16,
    )

    peak_tflops: float | None = runtime_field(
        None,
        "Dense TFLOP/s of one accelerator at `training.precision`, the base of MFU. Default: the planner's table. An "
        "accelerator that is not in the table has no MFU.",
        gt=0,
    )
    metrics_port: int | None = runtime_field(
        None,
        "Port at which rank 0 serves its metrics for Prometheus. The launcher uses the next port. Default: no metrics.",
        ge=1,
        le=65_534,
    )
    metrics_host: str = runtime_field(
        "127.0.0.1",
        "Address of the machine or pod for the metrics; `0.0.0.0` for Prometheus on another machine. Everyone who can "
        "reach it can read them.",
        pattern=r"^[0-9A-Za-z.:-]{1,255}$",
    )
