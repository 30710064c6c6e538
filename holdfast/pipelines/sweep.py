"""The sweep pipeline: train and evaluate one model for each trial on one dataset, compare them, register the best.

`python -m holdfast.pipelines.sweep --over training.optimizer.learning_rate=1e-3,3e-3 -o sweep.yaml` compiles it.
A trial that fails returns an empty output instead of a failed task, so that the comparison still runs (docs/sweeps.md).
"""

from kfp import dsl

from holdfast.pipelines.backends.kubeflow.steps import Pipeline, main


def sweep(step: Pipeline) -> None:
    """Trials of one dataset, compared; the best is registered."""
    with dsl.ExitHandler(step("notify", trials=step.trials), name="sweep"):
        dataset = {"dataset_id": step("preprocess", trials=step.trials)} if step.has_data else {}
        verdicts = []
        for number, overrides in enumerate(step.overrides, 1):
            trial = {"overrides": overrides, "trial": str(number)}
            model = step("train", **trial, **dataset).set_display_name(f"train-{number}")
            verdicts.append(step("evaluate", **trial, run_id=model).set_display_name(f"evaluate-{number}"))
        best = step("compare", **dataset, trials=step.trials).after(*verdicts)
        with dsl.If(best.outputs["Output"] == "blessed", name="if-blessed"):
            step("register", overrides=best.outputs["changes"], run_id=best.outputs["winner"])


if __name__ == "__main__":
    main(sweep)
