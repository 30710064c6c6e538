"""The facts that the exit handler reads from the outcomes of the steps."""

import pytest

from holdfast.spec import parse_spec, run_id
from holdfast.steps.outcomes import Outcome, run_of

SPEC = "{name: a, data: {sources: [{uri: x}]}}"
DATASET_ID = "0123456789abcdef"
PROMPTS = ["data.kind=prompts", "data.document_masks=true", "data.tokenizer={kind: file, path: t}"]
WITHOUT_MODELS = run_id(parse_spec(SPEC, [*PROMPTS, "training.grpo.rewards=[exact]"]), DATASET_ID)


@pytest.mark.parametrize(
    ("results", "overrides", "found"),
    [
        ({"preprocess": DATASET_ID}, [], run_id(parse_spec(SPEC), DATASET_ID)),
        ({"preprocess": DATASET_ID, "train": "fedcba9876543210"}, ["model.init_from=w"], "fedcba9876543210"),
        ({"preprocess": DATASET_ID}, ["model.init_from=w"], ""),  # this depends on the bytes of the weights
        ({"preprocess": DATASET_ID}, [*PROMPTS, "training.grpo.rewards=[{kind: model, model: w}]"], ""),
        ({"preprocess": DATASET_ID}, [*PROMPTS, "training.grpo.rewards=[exact]"], WITHOUT_MODELS),
        ({"preprocess": DATASET_ID}, ["training.steps=0"], ""),
        ({}, [], ""),
    ],
    ids=str,
)
def test_the_run_is_named_by_train_or_by_what_is_known_before_it(
    results: dict[str, str], overrides: list[str], found: str
) -> None:
    outcomes = [Outcome(step, 1, 0.0, result=result) for step, result in results.items()]
    assert run_of(outcomes, SPEC, overrides, "") == found
