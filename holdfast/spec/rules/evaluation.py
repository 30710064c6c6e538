"""Rules of `evaluation`."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec


def check_evaluation(spec: Spec) -> Iterator[Problem]:
    """Fields for a comparison or for samples are not given without one. No task is listed twice."""
    evaluation = spec.evaluation
    if evaluation.champion_tolerance and evaluation.versus_champion != "not_worse":
        yield Problem(
            "evaluation.champion_tolerance", evaluation.champion_tolerance,
            f"is not used by versus_champion: {evaluation.versus_champion}", "remove it, or use not_worse",
        )  # fmt: skip
    questions = [(task.uri, task.metric) for task in evaluation.tasks]
    for index, question in enumerate(questions):
        if question in questions[:index]:
            yield Problem(
                f"evaluation.tasks.{index}.uri", question[0], f"is listed twice with the metric {question[1]}",
                "keep one of them, because results are identified by task and metric",
            )  # fmt: skip
    for name in ("sample_tokens", "temperature"):
        value = getattr(evaluation, name)
        if not evaluation.prompts and value != type(evaluation).model_fields[name].default:
            yield Problem(
                f"evaluation.{name}", value, "is not used without prompts", "remove it, or give evaluation.prompts"
            )
