"""The DAG: preprocess, train, evaluate, and register what was blessed; whatever happens, notify at the end.

This is the product as a KFP pipeline. The same file runs on a cluster and, with `holdfast run`, on one machine.
"""

from typing import Any  # KFP reads annotations as objects: no `from __future__ import annotations` here

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.components.evaluate.component import evaluate
from holdfast.components.notify.component import notify
from holdfast.components.preprocess.component import preprocess
from holdfast.components.register.component import register
from holdfast.components.spec import Spec, dump_spec
from holdfast.components.train.component import train
from holdfast.components.trigger.component import trigger
from holdfast.pipelines.backends.kubeflow.platform import pipeline_config, place

# Every failure of a step is tried again: each of them resumes where it was, and one that cannot succeed fails at once.
RETRIES = 3
BACKOFF = "15s"
BACKOFF_FACTOR = 2  # an integer: the backend drops a fraction
# The backend counts this from the first start of the step, so it must be longer than the longest training.
RETRY_FOR = f"{90 * 24 * 3600}s"


def training_pipeline(spec: Spec, image: str | None = None, scheduled: bool = False) -> BaseComponent:
    """The pipeline of `spec`, whose text is the default of a parameter that a person can change in the KFP UI.

    `image` replaces the default image of every step. Where the pods run is decided here, and not by that parameter.
    A `scheduled` pipeline asks first whether a retraining is due, and does nothing when it is not.
    """

    def step(name: str, task: PipelineTask) -> PipelineTask:
        # Caching is ours: the identity of a dataset and of a run is its content, which KFP's cache key does not see.
        task.set_caching_options(enable_caching=False)
        task.set_retry(RETRIES, BACKOFF, BACKOFF_FACTOR, RETRY_FOR)
        if image:
            task.set_container_image(image)
        return place(task, name, spec)

    def train_and_register(common: dict[str, Any], salt: str) -> None:
        prepared = step("preprocess", preprocess(**common))
        trained = step("train", train(**common, salt=salt, dataset_id=prepared.outputs["Output"]))
        verdict = step("evaluate", evaluate(**common, run_id=trained.outputs["Output"]))
        # Only the word decides. A number can be NaN, and a text can hold a quote: both break conditions.
        with dsl.If(verdict.outputs["Output"] == "blessed", name="if-blessed"):
            step("register", register(**common, run_id=trained.outputs["Output"]))

    @dsl.pipeline(
        name=spec.name,
        description="Raw text to a registered language model.",
        pipeline_config=pipeline_config(spec),
    )
    def training(
        spec: str = dump_spec(spec),
        overrides: list = [],  # noqa: B006 - KFP reads it
        store: str = "",
        salt: str = "",
    ) -> None:
        """Train, evaluate and register the model that a spec describes.

        Args:
            spec: The spec, as YAML.
            overrides: Fields of the spec to change: a list of key=value, such as ["training.steps=50"].
            store: Root of the store, file:///path or s3://bucket/prefix. Empty takes the spec's, else HOLDFAST_STORE.
            salt: Anything here makes another run of the same inputs.
        """
        common = {"spec": spec, "overrides": overrides, "store": store, "job": dsl.PIPELINE_JOB_ID_PLACEHOLDER}
        with dsl.ExitHandler(step("notify", notify(**common, salt=salt)), name="run"):
            if scheduled:
                decision = step("trigger", trigger(**common, salt=salt))
                with dsl.If(decision.outputs["Output"] == "due", name="if-due"):
                    train_and_register(common, salt)
            else:
                train_and_register(common, salt)

    return training
