"""The retraining pipeline, for a schedule: trigger decides whether a retraining is due; if so, train and register.

`python -m holdfast.pipelines.retraining -o retraining.yaml` compiles it; `holdfast schedule` makes it a recurring run.
The triggers (time, new data, a decayed champion) are fields of the spec under `schedule`.
"""

from kfp import dsl

from holdfast.pipelines.backends.kubeflow.steps import Pipeline, main
from holdfast.pipelines.training import train_and_register


def retraining(step: Pipeline) -> None:
    """Raw text to a registered language model, when a retraining is due."""
    with dsl.ExitHandler(step("notify"), name="run"):
        decision = step("trigger")
        with dsl.If(decision.outputs["Output"] == "due", name="if-due"):
            train_and_register(step)


if __name__ == "__main__":
    main(retraining)
