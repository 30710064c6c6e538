"""The table of steps and the list of edges: complete, and equal for all readers."""

import inspect
from importlib import import_module

import pytest

from holdfast.pipelines.table import EDGES, FAN_OUT_EDGES, SCHEDULED_START, Edge, steps_from
from holdfast.steps import PARAMETERS, STEPS, Step, producer_of
from holdfast.steps.outcomes import EXIT_HANDLER


def test_every_step_is_on_the_way_or_at_the_end() -> None:
    assert [*steps_from(SCHEDULED_START, FAN_OUT_EDGES), "compare", EXIT_HANDLER] == list(STEPS)
    assert {*STEPS} - {*steps_from(SCHEDULED_START)} == {"divide", "tokenise", "compare", EXIT_HANDLER}


@pytest.mark.parametrize("edges", [EDGES, FAN_OUT_EDGES], ids=["one", "many"])
def test_an_input_is_a_parameter_of_the_dag_or_an_output_of_an_earlier_step(edges: tuple[Edge, ...]) -> None:
    before: set[str] = set()
    for name in steps_from(SCHEDULED_START, edges):
        step = STEPS[name]
        for item in step.inputs:
            assert item in PARAMETERS or producer_of(item) in before or item in (step.item, *step.optional)
        before.add(name)


def test_a_step_that_runs_for_each_item_follows_one_that_gives_a_list() -> None:
    edges = [(edge.before, edge.after) for edge in FAN_OUT_EDGES if edge.each]
    assert edges == [(step.name, "tokenise") for step in STEPS.values() if step.items in step.outputs]
    assert [step.name for step in STEPS.values() if step.item] == ["tokenise"]


def test_a_condition_compares_an_outcome() -> None:
    assert {edge.before: edge.when for edge in EDGES if edge.when} == {"trigger": "due", "evaluate": "blessed"}


@pytest.mark.parametrize(
    "step", [step for step in STEPS.values() if step.name != EXIT_HANDLER], ids=lambda one: one.name
)
def test_the_body_of_a_step_takes_the_inputs_of_the_table(step: Step) -> None:
    body = import_module(f"holdfast.components.{step.name}.__main__").body
    assert {*inspect.signature(body).parameters} == {
        "spec",
        "url",
        *step.inputs,
        *(["job"] if step.reads_job_outcomes else []),
    }
