"""Argo's list of failed nodes is parsed in every form: quoted twice, quoted once, or not quoted."""

import json

import pytest

from holdfast.components.notify.ending import first_failed_node

NODES = [
    {"templateName": "evaluate", "message": "Error (exit code 15)", "finishedAt": "2026-11-20T12:00:02Z"},
    {"templateName": "train", "message": "pod deleted", "finishedAt": "2026-11-20T12:00:01Z"},
]


@pytest.mark.parametrize("text", [json.dumps(NODES), json.dumps(json.dumps(NODES))])
def test_the_first_failed_node_is_reported_with_its_message(text: str) -> None:
    assert first_failed_node(text) == ("train", "pod deleted")


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '"[]"', "{{workflow.failures}}", "[1, null]", '[{"phase": "Failed"}]', '"']
)
def test_an_invalid_list_of_nodes_has_no_failed_node(text: str) -> None:
    assert first_failed_node(text) == ("", "")


def test_a_node_without_a_message_shows_its_phase() -> None:
    assert first_failed_node('[{"templateName": "train", "phase": "Error"}]') == ("train", "Error")
