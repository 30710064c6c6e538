"""The table of steps and the list of edges: complete, and the same for everybody who reads them."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from holdfast.components.runtime.outcomes import EXIT_HANDLER
from holdfast.components.steps import PARAMETERS, STEPS, giver_of
from holdfast.pipelines.training import EDGES, SCHEDULED_START, from_here


def test_every_step_is_on_the_way_or_at_the_end() -> None:
    assert [*from_here(SCHEDULED_START), EXIT_HANDLER] == list(STEPS)


def test_an_input_is_a_parameter_of_the_dag_or_an_output_of_an_earlier_step() -> None:
    before: set[str] = set()
    for name in from_here(SCHEDULED_START):
        for one in STEPS[name].inputs:
            assert one in PARAMETERS or giver_of(one) in before
        before.add(name)


def test_a_condition_looks_at_a_word() -> None:
    assert {edge.before: edge.when for edge in EDGES if edge.when} == {"trigger": "due", "evaluate": "blessed"}


@pytest.mark.parametrize(
    "step", [step for step in STEPS.values() if step.name != EXIT_HANDLER], ids=lambda one: one.name
)
def test_the_body_of_a_step_takes_what_the_table_says(step) -> None:
    body = import_module(f"holdfast.components.{step.name}.body").body
    assert {*inspect.signature(body).parameters} == {"spec", "url", *step.inputs}
