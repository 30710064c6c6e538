"""The runner: its plan and its arguments equal those of the compiled pipeline; and how a DAG ends."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from holdfast.pipelines.backends.kubeflow.compile import pipeline_ir, sweep_ir
from holdfast.pipelines.runner import Execution, Runner, plan
from holdfast.pipelines.trials import Trials, text_of
from holdfast.spec import ExitCode, Spec, parse_spec
from holdfast.spec.engine_text import unescape_tree
from holdfast.steps import ARTIFACTS, PARAMETERS, STEPS
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome

SPEC = parse_spec("{name: small, data: {sources: [{uri: 's3://bucket/x'}]}}")
FAN_OUT = parse_spec("{name: small, data: {sources: [{uri: 's3://bucket/x'}], fan_out: 3}}")
TRIALS: Trials = (("training.seed=1",), ("training.seed=2",), ("training.seed=3",))
ITEM = "<item>"


class Handle:
    """An execution that ends when it is polled, unless it waits for a cancellation."""

    leave_seconds = 600.0

    def __init__(self, steps: Steps, execution: Execution, code: int | str) -> None:
        self.steps, self.execution, self.code, self.stops = steps, execution, code, list[bool]()

    def poll(self) -> int | None:
        if isinstance(self.code, int):
            return self.code
        return int(ExitCode.TERMINATED) if self.stops else None

    def result(self) -> dict[str, Any]:
        outputs = self.steps.results[self.execution.step]
        if self.execution.part in ("2", "3"):  # a trial; KFP numbers trials from the second one
            outputs = {name: f"{value}-{self.execution.part}" for name, value in outputs.items()}
        return outputs

    def stop(self, *, force: bool) -> None:
        self.stops.append(force)


class Steps:
    """A backend whose steps end with codes from the test, and return the names of their outputs."""

    def __init__(self, width: int = 0, **codes: Sequence[int | str]) -> None:
        self.width, self.started, self.recorded = width, list[Execution](), list[Outcome]()
        self.codes = {name.replace("_", "-"): list(code_list) for name, code_list in codes.items()}
        self.most, self.left, self.on_wait = 0, 0, lambda: None
        self.handles: dict[str, Handle] = {}
        self.results: dict[str, Any] = {
            step.name: {output: f"<{step.name}.{output}>" for output in step.outputs} for step in STEPS.values()
        }
        for step in ("evaluate", "compare"):
            self.results[step]["word"] = "blessed"
        self.results["divide"]["shares"] = ["0/3", "1/3", "2/3"]
        self.results["compare"] |= {"changes": ["<compare.changes>"]}

    def start(self, execution: Execution) -> Handle:
        self.started.append(execution)
        codes = self.codes.get(execution.name) or self.codes.get(execution.step) or [0]
        self.handles[execution.name] = handle = Handle(self, execution, codes[0])
        if len(codes) > 1:
            codes.pop(0)
        return handle

    def wait(self, handles: Sequence[Any]) -> None:
        self.most = max(self.most, len(handles))
        self.on_wait()

    def retries(self, step: str) -> int:
        return 2 if step == "train" else 0

    def record(self, outcome: Outcome) -> None:
        self.recorded.append(outcome)

    def outcomes(self) -> list[Outcome]:
        return [Outcome("train", 1, 1.0, 2.0, 12, "NaN")]

    @property
    def names(self) -> list[str]:
        return [execution.name for execution in self.started]

    @property
    def ending(self) -> dict[str, str]:
        return words_of(self.started[-1])


def runner(steps: Steps, spec: Spec = SPEC, trials: Trials = ()) -> Runner:
    values = {name: f"<{name}>" for name in ("salt", "replan")} | ({"trials": text_of(trials)} if trials else {})
    return Runner(plan(spec, trials), steps, values)


def words_of(execution: Execution) -> dict[str, str]:
    pairs = (argument.removeprefix("--").partition("=") for argument in execution.arguments)
    return {name.replace("-", "_"): value for name, _, value in pairs}


class Compiled:
    """The steps of a compiled pipeline, read independently: their predecessors, their conditions and their inputs."""

    def __init__(self, ir: Mapping[str, Any]) -> None:
        self._ir = ir
        self.inputs: dict[str, dict[str, Any]] = {}
        self.before: dict[str, set[str]] = {}
        self.when: dict[str, str] = {}
        self.each: set[str] = set()
        self._read(ir["root"]["dag"]["tasks"], {name: f"<{name}>" for name in PARAMETERS}, set(), "")

    def _read(self, tasks: Mapping[str, Any], given: Mapping[str, Any], before: set[str], when: str) -> set[str]:
        """Read the tasks of a DAG with its inputs. Returns the steps in it."""
        within: dict[str, set[str]] = {}
        while waiting := [name for name in tasks if name not in within]:
            name = next(
                candidate for candidate in waiting if set(tasks[candidate].get("dependentTasks", ())) <= within.keys()
            )
            task, component = tasks[name], self._ir["components"][tasks[name]["componentRef"]["name"]]
            if ARTIFACTS in component.get("dag", {}).get("tasks", {}):  # shows addresses in a UI
                within[name] = set()
                continue
            inputs = {
                key: _source(source, given) for key, source in task.get("inputs", {}).get("parameters", {}).items()
            }
            needs = before.union(*(within[other_task] for other_task in task.get("dependentTasks", ())))
            if "dag" not in component:
                within[name] = {name}
                self.inputs[name], self.before[name], self.when[name] = inputs, needs, when
                continue
            condition = task.get("triggerPolicy", {}).get("condition", "")
            if loop := task.get("parameterIterator"):
                inputs[loop["itemInput"]] = ITEM
            outcomes = re.findall(r"== '(\w+)'", condition)
            within[name] = self._read(component["dag"]["tasks"], inputs, needs, outcomes[-1] if outcomes else when)
            self.each |= within[name] if loop else set()
        return set().union(*within.values())


def _source(how: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    if "runtimeValue" in how:
        return unescape_tree(how["runtimeValue"]["constant"])
    if "componentInputParameter" in how:
        name = how["componentInputParameter"]
        return given.get(name, given.get(name.removeprefix("pipelinechannel--")))
    if "taskFinalStatus" in how:
        return None
    source = how["taskOutputParameter"]
    step, _, number = source["producerTask"].partition("-")
    key = source["outputParameterKey"]
    return f"<{step}.{STEPS[step].outputs[0] if key == 'Output' else key}>" + (number and f"-{number}")


def numbered(name: str, trials: Trials) -> str:
    """KFP gives the steps of the first trial no number."""
    return f"{name}-1" if trials and name in STEPS and STEPS[name].per_trial else name


@pytest.mark.parametrize(
    ("spec", "trials"), [(SPEC, ()), (FAN_OUT, ()), (SPEC, TRIALS)], ids=["training", "fan-out", "sweep"]
)
def test_the_plan_and_the_inputs_of_the_steps_are_those_of_the_compiled_pipeline(spec: Spec, trials: Trials) -> None:
    compiled = Compiled((sweep_ir(spec, trials) if trials else pipeline_ir(spec))[0])
    nodes = {node.name: node for node in plan(spec, trials)}
    assert {numbered(name, trials) for name in compiled.inputs} == {*nodes, EXIT_HANDLER}

    def all_before(name: str) -> Iterator[str]:
        for predecessor in nodes[name].before:
            yield predecessor
            yield from all_before(predecessor)

    for name, needs in compiled.before.items():
        if name != EXIT_HANDLER:
            ours = set(all_before(numbered(name, trials)))
            closed = {numbered(need, trials) for need in needs}
            assert closed | {b for member in closed for b in all_before(member)} == ours
            assert nodes[numbered(name, trials)].when == compiled.when[name]
    assert {name for name, node in nodes.items() if node.each} == compiled.each

    steps = Steps()
    assert runner(steps, spec, trials).run() == 0
    for execution in steps.started:
        name = execution.step if execution.step in compiled.each else execution.name
        theirs = compiled.inputs[name if name in compiled.inputs else execution.step]
        arguments = words_of(execution)
        for name_of_input in STEPS[execution.step].inputs:
            assert arguments.get(name_of_input) == (
                execution.part if theirs.get(name_of_input) == ITEM else theirs.get(name_of_input)
            ), (name, name_of_input)
        assert arguments.get("trial") == theirs.get("trial")
        if trials:
            best = execution.step == "register"
            assert json.loads(arguments.get("overrides", "[]")) == (
                ["<compare.changes>"] if best else theirs["overrides"]
            )
    assert all(compiled.inputs["register"]["overrides"] == "<compare.changes>" for _ in trials)


def test_the_steps_of_a_run_start_one_after_the_other_and_the_exit_handler_last() -> None:
    steps = Steps()
    assert runner(steps).run() == 0
    assert steps.names == ["preprocess", "train", "evaluate", "register", "notify"]
    assert steps.ending == {"salt": "<salt>", "status": "succeeded", "message": ""}


def test_a_step_whose_condition_does_not_hold_is_skipped_and_recorded_so() -> None:
    steps = Steps()
    steps.results["evaluate"]["word"] = "not_blessed"
    assert runner(steps).run() == 0
    assert steps.names == ["preprocess", "train", "evaluate", "notify"]
    assert [(outcome.step, outcome.exit_code, outcome.result) for outcome in steps.recorded] == [
        ("register", 0, "skipped: evaluate says not_blessed")
    ]
    assert steps.ending["status"] == "succeeded"


@pytest.mark.parametrize(
    ("codes", "code", "status", "starts", "message"),
    [
        ([12], 12, "failed", 1, "train: NaN"),
        ([204], 204, "cancelled", 1, "train: NaN"),
        ([137, 0], 0, "succeeded", 2, ""),
        ([137, 137, 0], 0, "succeeded", 3, ""),
        ([137], 137, "failed", 3, "train: NaN"),  # two retries, and no more
    ],
)
def test_a_step_that_fails_ends_the_dag_with_its_code_and_one_that_was_killed_starts_again(
    codes: list[int], code: int, status: str, starts: int, message: str
) -> None:
    steps = Steps(train=codes)
    assert runner(steps).run() == code
    assert steps.names.count("train") == starts
    assert ("evaluate" in steps.names) is (code == 0)
    assert (steps.ending["status"], steps.ending["message"]) == (status, message)


def test_a_step_without_its_result_is_an_unexpected_failure() -> None:
    steps = Steps()
    del steps.results["train"]["run_id"]
    assert runner(steps).run() == ExitCode.UNEXPECTED
    assert steps.ending["status"] == "failed"


def test_a_backend_that_cannot_start_a_step_still_has_the_exit_handler_run(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    start = steps.start

    def fail_once(execution: Execution) -> Handle:
        if execution.step == "train":
            raise OSError(11, "Resource temporarily unavailable")
        return start(execution)

    monkeypatch.setattr(steps, "start", fail_once)
    assert runner(steps).run() == ExitCode.UNEXPECTED
    assert steps.names == ["preprocess", "notify"]
    assert steps.ending["status"] == "failed"


def test_list_items_run_concurrently_and_a_failure_stops_the_rest() -> None:
    steps = Steps(tokenise_0_3=["waits"], tokenise_1_3=[11], tokenise_2_3=["waits"])
    assert runner(steps, FAN_OUT).run() == 11
    assert steps.names == ["divide", "tokenise-0-3", "tokenise-1-3", "tokenise-2-3", "notify"]
    assert steps.most == 3
    assert [steps.handles[f"tokenise-{share}-3"].stops for share in range(3)] == [[False], [], [False]]
    assert steps.ending["status"] == "failed"


def test_a_step_that_does_not_stop_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(Handle):
        leave_seconds = 0.0

        def poll(self) -> int | None:
            return int(ExitCode.KILLED) if True in self.stops else None

    steps = Steps(tokenise_1_3=[11])
    start = steps.start

    def start_stubborn(execution: Execution) -> Handle:
        handle = start(execution)
        if execution.name == "tokenise-0-3":
            steps.handles[execution.name] = handle = Stubborn(steps, execution, "waits")
        return handle

    monkeypatch.setattr(steps, "start", start_stubborn)
    assert runner(steps, FAN_OUT).run() == 11
    assert steps.handles["tokenise-0-3"].stops == [False, True]


def test_a_request_to_stop_reaches_the_running_step_and_nothing_starts_after_it_but_the_exit_handler() -> None:
    steps = Steps(train=["waits"])
    walker = runner(steps)
    steps.on_wait = lambda: walker.request_stop() if "train" in steps.names else None
    assert walker.run() == ExitCode.TERMINATED
    assert steps.names == ["preprocess", "train", "notify"]
    assert steps.handles["train"].stops == [False]
    assert steps.handles["notify"].stops == []
    assert steps.ending["status"] == "cancelled"


def test_a_step_not_started_by_a_stopped_run_has_the_reason() -> None:
    steps = Steps()
    walker = runner(steps)
    steps.on_wait = walker.request_stop
    assert walker.run() == ExitCode.TERMINATED
    assert steps.names == ["preprocess", "notify"]
    assert [(outcome.step, outcome.exit_code, outcome.reason) for outcome in steps.recorded] == [
        ("train", 143, "not begun, because the run was stopped")
    ]


def test_a_sweep_with_one_step_at_a_time_runs_trial_by_trial() -> None:
    steps = Steps(width=1)
    assert runner(steps, SPEC, TRIALS).run() == 0
    trials = [f"{step}-{number}" for number in (1, 2, 3) for step in ("train", "evaluate")]
    assert steps.names == ["preprocess", *trials, "compare", "register", "notify"]
    assert steps.most == 1


def test_trials_run_together_where_the_backend_has_room() -> None:
    steps = Steps()
    assert runner(steps, SPEC, TRIALS).run() == 0
    assert steps.most == len(TRIALS)
    assert Counter(execution.step for execution in steps.started)["evaluate"] == len(TRIALS)


@pytest.mark.parametrize("code", [11, 137])
def test_a_trial_that_fails_alone_is_left_out_and_the_comparison_runs(code: int) -> None:
    steps = Steps(train_2=[code])
    assert runner(steps, SPEC, TRIALS).run() == 0
    assert "evaluate-2" not in steps.names
    assert {"evaluate-1", "evaluate-3", "compare", "register"} <= {*steps.names}
    assert steps.ending["status"] == "succeeded"


@pytest.mark.parametrize("code", [int(ExitCode.PREEMPTED), int(ExitCode.STORE_UNREACHABLE)])
def test_a_trial_that_is_not_alone_with_its_failure_ends_the_sweep(code: int) -> None:
    steps = Steps(width=1, evaluate_1=[code])
    assert runner(steps, SPEC, TRIALS).run() == code
    assert steps.names == ["preprocess", "train-1", "evaluate-1", "notify"]
