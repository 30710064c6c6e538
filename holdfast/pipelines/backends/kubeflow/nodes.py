"""The task list of a run on a KFP server: the nodes of its Argo Workflow.

A row does not name its own node, only its child nodes, by their ids. An id is the workflow's name and the FNV-1a hash
of the node's name, and that name is a path (`wf(0).root(0).exit-handler-1(0).train(0).executor(0)`). So the ids in the
list determine the paths. One node can have several rows; only the newest is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_BASIS, _PRIME, _BITS = 0x811C9DC5, 0x01000193, 0xFFFFFFFF  # FNV-1a, 32 bits
_TRY = re.compile(r"\(\d+\)$")
MAX_TRIES = 64  # of one node
EXECUTOR, DRIVER = "executor", "-driver"


@dataclass(frozen=True)
class Row:
    """One row of the task list."""

    name: str
    state: str  # empty: the node never began
    started: float | None  # unix seconds
    ended: float | None  # None while it runs
    error: str
    children: tuple[str, ...]  # node ids


class Tasks:
    """The task list of one run."""

    def __init__(self, run: Any) -> None:
        listed = list((run.run_details.task_details if run.run_details else None) or ())
        self.rows = [_row(task) for task in listed]
        self._ids = {child for row in self.rows for child in row.children}
        self._pods: dict[str, list[str]] | None = None

    def row(self, name: str) -> Row | None:
        """The newest row called `name`: the one with the later end, or one that began after it."""
        found = [row for row in self.rows if row.name == name]
        return max(found, key=lambda row: (row.ended or row.started or 0.0, row.ended is not None), default=None)

    def names(self) -> list[str]:
        """The distinct names in the list."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def pods(self, name: str) -> tuple[str, ...]:
        """The node ids of the pods of the task `name`, oldest first."""
        if self._pods is None:
            self._pods = {}
            for task, node in self._executors():
                self._pods.setdefault(task, []).append(node)
        return tuple(self._pods.get(name, ()))

    @property
    def workflow(self) -> str:
        """The name of the Argo Workflow; empty before it has nodes."""
        return next((child.rpartition("-")[0] for child in sorted(self._ids)), "")

    def pending_since(self, pods: Sequence[str]) -> float | None:
        """The time since when the newest of a task's `pods` is pending, in unix seconds.

        None where it has begun, or where the list does not determine it.
        """
        whole = [row for row in self.rows if row.name == EXECUTOR and pods and pods[-1] in row.children]
        if not whole or any(row.ended is not None for row in whole):
            return None
        begun = max(row.started or 0.0 for row in whole)
        tries = [row for row in self.rows if row.name == f"{EXECUTOR}({len(pods) - 1})" and row.started is not None]
        ours = [row for row in tries if (row.started == begun if len(pods) == 1 else (row.started or 0.0) > begun)]
        if not ours or any(row.state != "PENDING" for row in ours):
            return None
        return max(row.started or 0.0 for row in ours)

    def _executors(self) -> Iterator[tuple[str, str]]:
        """(task, id) of each node that is a pod of a task."""
        names = sorted({name for row in self.rows if "." not in (name := _TRY.sub("", row.name))})
        for workflow in sorted({child.rpartition("-")[0] for child in self._ids}):
            for path in self._below(workflow, workflow, _hash(workflow), names):
                *_, outer, last = ("", *path.split("."))
                if last.startswith(f"{EXECUTOR}("):
                    yield _TRY.sub("", outer), f"{workflow}-{_hash(path)}"

    def _below(self, workflow: str, path: str, known: int, names: list[str]) -> Iterator[str]:
        """The paths of the nodes below `path` whose ids are in the list."""
        if _TRY.search(path):
            outer = _TRY.sub("", path).rpartition(".")[2]
            more = [] if outer == EXECUTOR or outer.endswith(DRIVER) else [f".{name}" for name in names]
        else:
            more = [*(f"({number})" for number in range(MAX_TRIES)), ".onExit"]
        for part in more:
            value = _hash(part, known)
            if f"{workflow}-{value}" in self._ids:
                yield path + part
                yield from self._below(workflow, path + part, value, names)


def _row(task: Any) -> Row:
    started, ended = task.start_time or task.create_time, task.end_time
    over = started is not None and ended is not None and ended >= started
    return Row(
        str(task.display_name or ""),
        str(task.state or "").replace("RUNTIME_STATE_UNSPECIFIED", ""),
        started.timestamp() if started is not None else None,
        ended.timestamp() if over else None,
        str(task.error.message or "") if task.error else "",
        tuple(child.pod_name for child in task.child_tasks or () if child.pod_name),
    )


def _hash(text: str, value: int = _BASIS) -> int:
    for byte in text.encode():
        value = ((value ^ byte) * _PRIME) & _BITS
    return value
