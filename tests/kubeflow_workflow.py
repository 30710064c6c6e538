"""The rows of a run on a KFP server: the nodes of its Argo Workflow, as in `tests/recordings/kfp`.

A task is an Argo node after a driver node. A step has a retry node around its pods, which are the rows `executor(0)`,
`executor(1)`, and so on. A row does not contain its node id; only its parent lists it. A row that was read while its
node ran can stay unchanged next to a later row with the outcome.
"""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

NEVER = "0001-01-01T00:00:00Z"  # the end time of a running node
BEGIN = datetime(2026, 11, 20, 10, 0, 0, tzinfo=UTC)
SECONDS = 7  # the duration of a step
ENDED = ("SUCCEEDED", "FAILED", "SKIPPED")
HELPERS = ("importer", "importer-2", "artifacts")  # tasks that are not steps of ours
TEMPLATE = "retry-system-container-impl"


@dataclass(frozen=True)
class Node:
    """A step of a workflow: its state, the state of its newest pod (default: the same), and its number of pods."""

    state: str
    pod: str = ""
    tries: int = 1


def node_id(workflow: str, name: str) -> str:
    """Argo's id of a node: the workflow and the FNV-1a hash of the node's name."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return f"{workflow}-{value}"


class Workflow:
    """The Argo Workflow of one run of the pipeline `spec`, which began at `begin`."""

    def __init__(self, run_id: str, name: str, spec: Mapping[str, Any], begin: datetime = BEGIN) -> None:
        self.name, self.begin = name, begin
        self._run_id, self._spec = run_id, spec
        self._known: dict[str, dict[str, Any]] = {}  # by node name
        self._stale: list[dict[str, Any]] = []
        self.steps: Mapping[str, Node] = {}  # of the last `rows` call
        self._places: dict[str, str] = {}  # the node name of each step

    def executor(self, step: str, attempt: int = 0) -> str:
        """The id of the node that is a pod of `step`."""
        return node_id(self.name, f"{self._places[step]}(0).executor({attempt})")

    def pod(self, step: str, attempt: int = 0) -> str:
        """The name of that pod."""
        return f"{self.name}-{TEMPLATE}-{self.executor(step, attempt).rpartition('-')[2]}"

    def rows(self, state: str, steps: Mapping[str, Node]) -> list[dict[str, Any]]:
        """The rows of the run in `state`, with the given states of `steps`. Other steps have not started."""
        table: dict[str, dict[str, Any]] = {}
        over = state in ENDED
        self.steps = {name: node for name, node in steps.items() if node.state != "SKIPPED"}
        top = self._add(table, self.name, self.name, state, 0)
        self._add(table, f"{top}.root-driver", "root-driver", "SUCCEEDED", 0)
        inner = self._add(table, f"{top}.root", "root", state, 10)
        handled_tasks, (last,) = (
            self._spec["root"]["dag"]["tasks"]["exit-handler-1"],
            [task for name, task in self._spec["root"]["dag"]["tasks"].items() if name != "exit-handler-1"],
        )
        self._add(table, f"{inner}.exit-handler-1-driver", "exit-handler-1-driver", "SUCCEEDED", 10)
        below = {name: node for name, node in steps.items() if name != "notify"}
        outer = self._add(table, f"{inner}.exit-handler-1", "exit-handler-1", _state_of(below.values(), state), 20)
        self._walk(table, outer, handled_tasks, below, over)
        if "notify" in steps:
            place = self._add(table, f"{inner}.exit-handler-1.onExit", "exit-handler-1.onExit", "RUNNING", 200)
            self._task(table, place, "notify", last, steps, over=False, offset=210)
        for name, row in table.items():
            row["child_tasks"] = [{"pod_name": node_id(self.name, child)} for child in _children(name, table)]
            before = self._known.get(name)
            if before is not None and before["state"] != row["state"] and before.get("end_time") == NEVER:
                self._stale.append(before | {"task_id": self._task_id(f"{name} {len(self._stale)}")})
        self._known = table
        return sorted([*self._stale, *(_sent(row) for row in table.values())], key=lambda row: str(row["task_id"]))

    def _walk(
        self, made: dict[str, dict[str, Any]], inside: str, task: Mapping[str, Any], steps: Mapping[str, Node],
        over: bool,
    ) -> None:  # fmt: skip
        dag = self._spec["components"][task["componentRef"]["name"]]["dag"]
        for number, name in enumerate(_in_order(dag["tasks"])):
            self._task(made, inside, name, dag["tasks"][name], steps, over=over, offset=30 + 20 * number)

    def _task(
        self, made: dict[str, dict[str, Any]], inside: str, name: str, task: Mapping[str, Any],
        steps: Mapping[str, Node], *, over: bool, offset: int,
    ) -> None:  # fmt: skip
        place = f"{inside}.{name}"
        component = self._spec["components"][task["componentRef"]["name"]]
        below = (
            {child: steps[child] for child in self._below(component) if child in steps} if "dag" in component else {}
        )
        node = steps.get(name) or (Node(_state_of(below.values(), "")) if below else None)
        if node is None:
            if over:  # a node that Argo omits has no state
                for row_name in (f"{name}-driver", name):
                    self._add(made, f"{inside}.{row_name}", row_name, "", offset, retried=False)
            return
        self._add(made, f"{place}-driver", f"{name}-driver", "SUCCEEDED", offset - 10)
        skipped = "dag" in component and all(child.state == "SKIPPED" for child in below.values())
        outer = self._add(made, place, name, "SKIPPED" if skipped else node.state, offset, retried=not skipped)
        if skipped:
            return
        if "dag" in component:
            self._walk(made, outer, task, below, over)
            return
        self._places[name] = place
        self._add(made, f"{outer}.executor", "executor", node.state, offset, retried=False)
        for attempt in range(node.tries):
            newest = attempt == node.tries - 1
            row = f"executor({attempt})"
            self._row(made, f"{outer}.{row}", row, (node.pod or node.state) if newest else "FAILED", offset)

    def _below(self, component: Mapping[str, Any]) -> Iterator[str]:
        for name, task in component["dag"]["tasks"].items():
            inner = self._spec["components"][task["componentRef"]["name"]]
            if "dag" in inner:
                yield from self._below(inner)
            else:
                yield name

    def _add(
        self, made: dict[str, dict[str, Any]], place: str, name: str, state: str, offset: int, *, retried: bool = True
    ) -> str:
        """Add a node and the node of its try. Returns the name of the latter."""
        self._row(made, place, name, state, offset)
        if retried:
            self._row(made, f"{place}(0)", f"{name}(0)", state, offset)
        return f"{place}(0)" if retried else place

    def _row(self, made: dict[str, dict[str, Any]], place: str, name: str, state: str, offset: int) -> None:
        begun = self.begin + timedelta(seconds=offset)
        ended = begun if state in ("", "SKIPPED") else begun + timedelta(seconds=SECONDS)
        made[place] = {
            "run_id": self._run_id, "task_id": self._task_id(place), "display_name": name, "state": state,
            "create_time": _time(self.begin), "start_time": _time(begun),
            "end_time": NEVER if state in ("RUNNING", "PENDING") else _time(ended),
        }  # fmt: skip

    def _task_id(self, place: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._run_id} {place}"))


def _state_of(nodes: Any, run: str) -> str:
    """The state of a DAG, from the states of its steps."""
    states = {node.state for node in nodes}
    if states & {"RUNNING", "PENDING"} or (run and run not in ENDED):
        return "RUNNING"
    return "FAILED" if "FAILED" in states else "SUCCEEDED" if states else run


def _in_order(tasks: Mapping[str, Any]) -> list[str]:
    ordered: list[str] = []
    while len(ordered) < len(tasks):
        ordered += [
            name
            for name, task in sorted(tasks.items())
            if name not in ordered and all(dependency in ordered for dependency in task.get("dependentTasks", ()))
        ]
    return ordered


def _children(name: str, made: Mapping[str, Any]) -> list[str]:
    """The nodes that Argo lists below a node: its tries or its contents."""
    inside = name.removesuffix("-driver(0)") if name.endswith("-driver(0)") else ""
    if inside:
        return [inside] if inside in made else []
    if name.endswith("executor"):
        return [row_name for row_name in made if row_name.startswith(f"{name}(")]
    if f"{name}(0)" in made:
        return [f"{name}(0)", *(row_name for row_name in (f"{name}.onExit",) if row_name in made)]
    return [
        row_name
        for row_name in made
        if row_name.startswith(f"{name}.") and "." not in row_name[len(name) + 1 :] and not row_name.endswith(")")
    ][:1]


def _sent(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON, without empty fields."""
    return {key: value for key, value in row.items() if value != "" and value != []}


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def nodes_of(steps: Mapping[str, str | Node]) -> dict[str, Node]:
    """States of steps as nodes. The helper tasks are included once the step after them has started."""
    nodes = {name: node if isinstance(node, Node) else Node(node) for name, node in steps.items()}
    if nodes.get("train", Node("")).state == "SUCCEEDED":
        nodes = {**{name: Node("SUCCEEDED") for name in HELPERS}, **nodes}
    return {name: replace(node, pod=node.pod or node.state) for name, node in nodes.items()}
