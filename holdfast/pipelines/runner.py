"""The runner: executes the DAG of `holdfast.pipelines.table`.

A backend starts, awaits and ends steps; the runner decides everything else:

- A step starts after the steps that it needs.
- A condition that does not hold skips the following steps.
- The exit handler always runs, and runs last.
- The exit code is that of the first failed step.
- In a sweep, a failed trial ends only itself. The comparison starts when every trial has ended.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.pipelines.backends.interface import SKIPPED
from holdfast.pipelines.table import Edge, edges_of, inputs_of, start_of, steps_from
from holdfast.pipelines.trials import Trials
from holdfast.runtime.exits import code_of
from holdfast.spec import ExitCode, Spec
from holdfast.steps import STEPS, TRIAL, producer_of
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome
from holdfast.steps.table import ENDS_ALL_TRIALS

NOT_STARTED = "not begun, because the run was stopped"

log = logging.getLogger("holdfast.runner")


@dataclass(frozen=True)
class Node:
    """A step in the DAG, or its copy for one trial of a sweep."""

    step: str
    trial: int = 0  # from 1; 0 outside a sweep
    overrides: tuple[str, ...] = ()  # of the trial
    before: tuple[str, ...] = ()  # names of the nodes that it needs
    when: str = ""  # it runs only if the first output of the previous node equals this word
    each: bool = False  # it runs once per item of the previous node's list
    until: int = 0  # of a training that a search pauses: the step; 0: it trains to its last step

    @property
    def name(self) -> str:
        """The name of the node in the DAG. Its outcome has the same one, without the step of a pause."""
        name = f"{self.step}-{self.trial}" if self.trial else self.step
        return f"{name}-until-{self.until}" if self.until else name


def plan(spec: Spec, trials: Trials = ()) -> tuple[Node, ...]:
    """The nodes of the DAG of a spec or sweep, without the exit handler; each comes after those that it needs."""
    sweep = bool(trials)
    return tuple(_nodes(start_of(spec, sweep=sweep), edges_of(spec, sweep=sweep), trials))


def _nodes(start: str, edges: Sequence[Edge], trials: Trials) -> Iterator[Node]:
    steps = list(steps_from(start, edges))
    incoming = {edge.after: edge for edge in edges if edge.before in steps}
    numbers = range(1, len(trials) + 1)
    trial_steps = [step for step in steps if trials and STEPS[step].per_trial]

    def node(step: str, number: int = 0) -> Node:
        edge, parents = incoming.get(step), []
        if edge is not None and edge.before in trial_steps:
            parents = [f"{edge.before}-{trial}" for trial in ((number,) if number else numbers)]
        elif edge is not None:
            parents = [edge.before]
        changes = trials[number - 1] if number else ()
        return Node(step, number, changes, tuple(parents), edge.when if edge else "", edge is not None and edge.each)

    for step in steps:
        if step not in trial_steps:
            yield node(step)
        elif step == trial_steps[0]:  # trial by trial: if steps run one at a time, the first result is early
            yield from (node(trial_step, number) for number in numbers for trial_step in trial_steps)


@dataclass(frozen=True)
class Execution:
    """One process of a step: the whole step or one part of it."""

    step: str
    part: str = ""  # trial, or item of a list
    arguments: tuple[str, ...] = ()  # of its command line, without the spec, the store and the job

    @property
    def name(self) -> str:
        """The name of its outcome."""
        part = re.sub(r"[^A-Za-z0-9._-]+", "-", self.part)
        return f"{self.step}-{part}" if part else self.step


class Handle(Protocol):
    """A started execution."""

    leave_seconds: float  # from a stop request to a kill; infinite: never kill

    def poll(self) -> int | None:
        """Its exit code; None while it runs or waits for resources."""

    def result(self) -> Mapping[str, Any]:
        """The outputs of a successful step."""

    def stop(self, *, force: bool) -> None:
        """Ask it to save and exit, or kill it."""


class StepBackend(Protocol):
    """Starts and awaits steps."""

    width: int  # concurrent executions; 0: all that are ready

    def start(self, execution: Execution) -> Handle:
        """Start an execution."""

    def wait(self, handles: Sequence[Handle]) -> None:
        """Return when an execution may have ended, and at least once a second."""

    def retries(self, step: str) -> int:
        """How often the runner restarts a killed step."""

    def record(self, outcome: Outcome) -> None:
        """Store an outcome for a step that did not start."""

    def outcomes(self) -> list[Outcome]:
        """The recorded outcomes of the steps."""


@dataclass
class _Running:
    node: Node
    execution: Execution
    handle: Handle
    retries: int
    deadline: float = 0.0  # monotonic time of the kill; 0: no stop request yet

    def ask_to_leave(self) -> None:
        """Ask it to exit once; kill it at the deadline."""
        now = time.monotonic()
        if not self.deadline or now > self.deadline:
            self.handle.stop(force=bool(self.deadline))
            self.deadline = now + self.handle.leave_seconds


class Runner:
    """One execution of a DAG."""

    def __init__(self, nodes: Sequence[Node], backend: StepBackend, given: Mapping[str, str]) -> None:
        """`given`: parameters of the DAG for steps, as text, including the trials of a sweep."""
        self._nodes = {node.name: node for node in nodes}
        self._steps = {node.step for node in nodes}
        self._copied = {node.step for node in nodes if node.trial}
        self._backend, self._given = backend, given
        self._waiting = list(nodes)
        self._queue: list[tuple[Node, Execution]] = []  # of nodes that are ready
        self._running: list[_Running] = []
        self._left: dict[str, int] = {}  # unfinished executions per node
        self._ended: dict[str, bool] = {}  # ended nodes: whether their successors may run
        self._results: dict[str, Mapping[str, Any]] = {}
        self._code, self._failed = int(ExitCode.OK), ""
        self._stopping = False

    def request_stop(self) -> None:
        """Ask the steps to save and exit, and start no further step except the exit handler. Safe in
        signal handlers.
        """
        self._stopping = True

    def run(self) -> int:
        """Run the DAG to its end. Returns the exit code of the first failed step."""
        try:
            self._walk()
        except Exception as error:
            log.exception("the runner failed; the steps that run are stopped")
            self._fail(code_of(error), "runner")
            self._walk()
        self._notify()
        return self._code

    def _walk(self) -> None:
        while True:
            self._enqueue()
            self._start()
            if not self._running:
                return
            if self._leaving:
                for running in self._running:
                    running.ask_to_leave()
            self._backend.wait([running.handle for running in self._running])
            self._collect()

    @property
    def _leaving(self) -> bool:
        return self._stopping or self._code != ExitCode.OK

    def _enqueue(self) -> None:
        """Queue every ready node. The plan lists each node after those that it needs."""
        for node in [node for node in self._waiting if all(name in self._ended for name in node.before)]:
            self._waiting.remove(node)
            if not self._should_run(node):
                self._ended[node.name] = False
                return self._enqueue()
            executions = list(self._executions(node))
            self._left[node.name] = len(executions)
            self._queue += [(node, execution) for execution in executions]
            if not executions:
                self._ended[node.name] = True
        order = list(self._nodes)
        self._queue.sort(key=lambda one: order.index(one[0].name))
        return None

    def _should_run(self, node: Node) -> bool:
        parents = [self._nodes[name] for name in node.before]
        if not node.trial and any(parent.trial for parent in parents):  # the comparison, of successful trials
            return True
        if not all(self._ended[parent.name] for parent in parents):
            return False
        if node.when and (word := str(self._results[parents[0].name][STEPS[parents[0].step].outputs[0]])) != node.when:
            reason = f"{parents[0].name} says {word}"
            log.info("%s is skipped: %s", node.name, reason)
            now = time.time()
            result = f"{SKIPPED}: {reason}"
            self._backend.record(Outcome(node.step, os.getpid(), now, now, int(ExitCode.OK), result=result))
            return False
        return True

    def _executions(self, node: Node) -> Iterator[Execution]:
        if not node.each:
            yield Execution(node.step, str(node.trial or ""), self._arguments(node.step, node))
            return
        parent = self._nodes[node.before[0]]
        for item in self._results[parent.name][STEPS[parent.step].items]:
            yield Execution(node.step, str(item), self._arguments(node.step, node, str(item)))

    def _arguments(self, step: str, node: Node | None = None, item: str = "") -> tuple[str, ...]:
        """The arguments of a step's command line: its inputs, and its trial in a sweep."""
        values: dict[str, Any] = {}
        trial, overrides = (node.trial, node.overrides) if node else (0, ())
        input_names = inputs_of(step, self._steps)
        for name in (name for name in STEPS[step].inputs if name in input_names or name in self._given):
            producer = producer_of(name)
            if name == STEPS[step].item:
                values[name] = item
            elif not producer:
                values[name] = self._given[name]
            elif producer in self._copied and not trial and node:
                best = self._results[node.before[0]]
                values[name], overrides = best["winner"], tuple(best["changes"])
            else:
                values[name] = self._results[f"{producer}-{trial}" if producer in self._copied else producer][name]
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        arguments += [f"--{TRIAL}={trial}"] if trial else []
        if node and node.until:
            overrides = (*overrides, f"training.pause_at={node.until}")
        arguments += [f"--overrides={json.dumps(overrides)}"] if overrides else []
        return tuple(arguments)

    def _start(self) -> None:
        """Start queued executions up to the backend's width."""
        width = self._backend.width
        while self._queue and not self._leaving and (not width or len(self._running) < width):
            node, execution = self._queue.pop(0)
            handle = self._backend.start(execution)
            self._running.append(_Running(node, execution, handle, self._backend.retries(node.step)))
        if self._queue and self._leaving:
            execution = self._queue[0][1]
            self._queue.clear()
            if self._code == ExitCode.OK:
                now, code, part = time.time(), int(ExitCode.TERMINATED), execution.part
                self._backend.record(Outcome(execution.step, os.getpid(), now, now, code, NOT_STARTED, part=part))
                self._fail(code, execution.name)

    def _collect(self) -> None:
        """Process ended executions."""
        for running in list(self._running):
            if (code := running.handle.poll()) is None:
                continue
            self._running.remove(running)
            if code == ExitCode.KILLED and running.retries and not self._leaving:
                log.warning("%s was killed; it starts again", running.execution.name)
                handle = self._backend.start(running.execution)
                self._running.append(_Running(running.node, running.execution, handle, running.retries - 1))
            else:
                self._end(running, code)

    def _end(self, one: _Running, code: int) -> None:
        node, result = one.node, one.handle.result() if code == ExitCode.OK else {}
        if code == ExitCode.OK and (missing := [name for name in STEPS[node.step].outputs if name not in result]):
            log.error("%s ended without its result: %s", one.execution.name, ", ".join(missing))
            code = int(ExitCode.UNEXPECTED)
        if code == ExitCode.OK:
            self._results[node.name] = result
            self._left[node.name] -= 1
            if not self._left[node.name]:
                self._ended[node.name] = True
        elif node.trial and code not in ENDS_ALL_TRIALS:
            log.warning("%s failed (exit code %d); the comparison leaves this trial out", one.execution.name, code)
            self._ended[node.name] = False
        else:
            self._fail(code, one.execution.name)

    def _fail(self, code: int, name: str) -> None:
        """Record the first code that is not OK as that of the DAG."""
        if self._code == ExitCode.OK:
            self._code, self._failed = int(code), name

    def _notify(self) -> None:
        """Run the exit handler. Its failure changes nothing."""
        code = self._code
        interrupted = self._stopping or ExitCode.is_interruption(code)
        status = "succeeded" if code == ExitCode.OK else "cancelled" if interrupted else "failed"
        reason = ""
        if self._failed:
            failures = [
                outcome
                for outcome in self._backend.outcomes()
                if outcome.reason and self._failed in (outcome.name, outcome.step)
            ]
            reason = f"{self._failed}: {failures[-1].reason if failures else f'exit code {code}'}"
        arguments = (*self._arguments(EXIT_HANDLER), f"--status={status}", f"--message={reason}")
        handle = self._backend.start(Execution(EXIT_HANDLER, arguments=arguments))
        while handle.poll() is None:
            self._backend.wait([handle])
