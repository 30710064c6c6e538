"""Argo's report of a Workflow's failed nodes: the first of them, as text.

It fails on no input from Argo. The step's own message is in its outcome in the store.
"""

from __future__ import annotations

from typing import Any

from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_value


def first_failed_node(failures: str) -> tuple[str, str]:
    """The template and the message of the first node in `workflow.failures`, or empty strings.

    Argo quotes this list once more than its other parameters, and names retries as `step(1)`.
    """
    nodes = [node for node in _decoded(failures) if isinstance(node, dict) and node.get("templateName")]
    if not nodes:
        return "", ""
    first = min(nodes, key=lambda node: str(node.get("finishedAt") or "~"))
    return str(first["templateName"]), str(first.get("message") or first.get("phase") or "")


def _decoded(text: str) -> list[Any]:
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = parse_json_value(value, "workflow.failures")
            except DataError:
                return []
    return value if isinstance(value, list) else []
