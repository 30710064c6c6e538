"""The DAG of `holdfast.pipelines.sweep` as a KFP pipeline. The same file runs on a cluster and on one machine."""

from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.kubeflow.pipeline import spec_default, task_of
from holdfast.pipelines.backends.kubeflow.platform import pipeline_config
from holdfast.pipelines.sweep import Trials, text_of
from holdfast.runtime.outcomes import EXIT_HANDLER
from holdfast.spec import Spec
from holdfast.spec.engine_text import escape, escape_tree
from holdfast.steps import STEPS, values_of

DESCRIPTION = "Trials of one dataset, compared; the best is registered."


def sweep_pipeline(spec: Spec, trials: Trials, image: str | None = None) -> BaseComponent:
    """The pipeline of the trials of `spec`. `image` replaces the default image of every step.

    A trial that fails tells that instead of failing its task (see `holdfast.steps.faces.component`): what
    KFP 2.17 makes of `ignore_upstream_failure` is a hook of each of the tasks before, which nothing can come after
    (kubeflow/pipelines: backend/src/v2/compiler/argocompiler/dag.go).
    """
    values, trials_text = escape_tree(values_of(spec)), escape(text_of(trials))

    def sweep(spec_given: Any, store: Any, salt: Any, replan: Any) -> None:
        parameters = {"spec": spec_given, "store": store, "salt": salt, "replan": replan}

        def task(name: str, overrides: Any, **inputs: Any) -> PipelineTask:
            common = {"spec": spec_given, "store": store, "overrides": overrides, "compiled": values, **values}
            taken = {one: parameters[one] for one in STEPS[name].inputs if one in parameters}
            return task_of(name, {**common, **taken, **inputs}, spec, image)

        def all_trials() -> None:
            dataset = task("preprocess", [], trials=trials_text).outputs["Output"]
            judged = []
            for number, changes in enumerate(trials, 1):
                of_it = {"overrides": escape_tree(changes), "trial": str(number)}
                trained = task("train", **of_it, dataset_id=dataset).set_display_name(f"train-{number}")
                evaluated = task("evaluate", **of_it, run_id=trained.outputs["Output"])
                judged.append(evaluated.set_display_name(f"evaluate-{number}"))
            best = task("compare", [], dataset_id=dataset, trials=trials_text).after(*judged)
            with dsl.If(best.outputs["Output"] == "blessed", name="if-blessed"):
                task("register", best.outputs["changes"], run_id=best.outputs["winner"])

        with dsl.ExitHandler(task(EXIT_HANDLER, [], trials=trials_text), name="sweep"):
            all_trials()

    def pipeline(spec: dict, store: str = "", salt: str = "", replan: bool = False) -> None:
        sweep(spec, store, salt, replan)

    pipeline.__defaults__ = (spec_default(spec), "", "", False)
    name = f"{spec.name}-sweep"
    return dsl.pipeline(pipeline, name=name, description=DESCRIPTION, pipeline_config=pipeline_config(spec))
