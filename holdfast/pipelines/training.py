"""The training pipeline: preprocess, train, evaluate, register a blessed model; notify at the end, also after failures.

`python -m holdfast.pipelines.training -o training.yaml` compiles it to a file that the Kubeflow UI takes. `holdfast
compile` writes the same pipeline. The other backends render `holdfast.pipelines.table`; a test
holds that both are the same DAG.
"""

from kfp import dsl

from holdfast.pipelines.backends.kubeflow.steps import Pipeline, main


def training(step: Pipeline) -> None:
    """Raw text to a registered language model."""
    with dsl.ExitHandler(step("notify"), name="run"):
        train_and_register(step)


def train_and_register(step: Pipeline) -> None:
    """The steps; each resumes its work and returns what it has already finished. A training script may have no data,
    and no evaluation."""
    if step.has_data:
        dataset = preprocess_in_parallel(step) if step.fan_out > 1 else step("preprocess")
        model = step("train", dataset_id=dataset)
        step.show_artifacts(dataset, model)
    else:
        model = step("train")
    if not step.is_evaluated:
        return
    verdict = step("evaluate", run_id=model)
    with dsl.If(verdict.outputs["Output"] == "blessed", name="if-blessed"):
        step("register", run_id=model)


def preprocess_in_parallel(step: Pipeline) -> dsl.PipelineTask:
    """`data.fan_out` pods tokenise a share of the sources each, and preprocess joins their results."""
    division = step("divide")
    with dsl.ParallelFor(division.outputs["shares"], name="each-tokenise", parallelism=step.fan_out) as share:
        tokenised = step("tokenise", division=division, share=share)
    return step("preprocess", division=division).after(tokenised)


if __name__ == "__main__":
    main(training)
