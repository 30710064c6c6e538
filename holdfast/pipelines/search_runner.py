"""Runner of a search: it adds the nodes of the next trial when the former ones have ended.

A decision is in the store before its training starts, and its score before the next decision. After a kill, the runner
reads the log, repeats the step that was interrupted, and continues.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.pipelines.runner import Node, Runner, StepBackend, _Running
from holdfast.pipelines.table import START
from holdfast.pipelines.trials import text_of
from holdfast.search.log import WHOLE, LogEntry, SearchLog, trials_begun
from holdfast.search.method import Search, decide
from holdfast.spec import ExitCode, Spec
from holdfast.store import Store

# Failures that belong to the values of a trial, and that every repetition has. Any other failure ends the search; the
# same command resumes it.
OF_THE_TRIAL = (
    ExitCode.BAD_SPEC,
    ExitCode.BAD_DATA,
    ExitCode.DIVERGED,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.USER_CODE,
)


class SearchRunner(Runner):
    """One execution of the DAG of a search: preprocess, trials one at a time, compare, and register the best."""

    def __init__(
        self, search: Search, search_id: str, spec: Spec, store: Store, backend: StepBackend, given: Mapping[str, str]
    ) -> None:
        """`given` are the parameters of the DAG, without the trials."""
        super().__init__([Node(START)], backend, given)
        self._steps |= {"train", "evaluate", "compare"}
        self._copied |= {"train", "evaluate"}
        self._search, self._budget = search, spec.training.steps
        self._log = SearchLog(store, search_id)
        self._has_all_trials = False
        self._give_trials()

    def _give_trials(self) -> None:
        self._given = {**self._given, "trials": text_of(tuple(trials_begun(self._log.entries)), self._log.id)}

    def _enqueue(self) -> None:
        super()._enqueue()
        while not (self._waiting or self._queue or self._running or self._leaving or self._has_all_trials):
            self._extend()
            super()._enqueue()

    def _extend(self) -> None:
        """Add the nodes of the next decision, or the last ones."""
        decision = decide(self._search, self._budget, self._log)
        self._give_trials()
        if decision is None:
            trials = tuple(name for name, node in self._nodes.items() if node.trial)
            self._add(Node("compare", before=trials or (START,)), Node("register", before=("compare",), when="blessed"))
            self._has_all_trials = True
            return
        trial = Node("train", decision.trial, decision.changes, (START,), until=decision.until)
        score = Node("evaluate", decision.trial, decision.changes, (trial.name,))
        self._add(trial, *([score] if decision.until == WHOLE else []))

    def _add(self, *nodes: Node) -> None:
        self._nodes |= {node.name: node for node in nodes}
        self._waiting += nodes

    def _end(self, one: _Running, code: int) -> None:
        node = one.node
        if node.trial and code != ExitCode.OK and code not in OF_THE_TRIAL:
            self._fail(code, one.execution.name)
            return
        super()._end(one, code)
        if code == ExitCode.OK and self._ended.get(node.name) is False:
            self._fail(ExitCode.UNEXPECTED, one.execution.name)  # it has no result, and so no score
        if self._code == ExitCode.OK and node.trial and (score := self._score(node, code)) is not None:
            self._log.add_score(score)
            self._give_trials()

    def _score(self, node: Node, code: int) -> LogEntry | None:
        """The score of a trial whose step has ended; None if another step follows."""
        entry = LogEntry(kind="score", trial=node.trial, until=node.until)
        if not self._ended[node.name]:
            outcomes = [outcome for outcome in self._backend.outcomes() if outcome.part == str(node.trial)]
            reasons = [outcome.reason for outcome in outcomes if outcome.step == node.step and outcome.reason]
            failure = {"exit_code": code, "failed_step": node.step, "reason": reasons[-1] if reasons else ""}
            return entry.model_copy(update=failure)
        result = self._results[node.name]
        if node.step == "train" and node.until:
            return entry.model_copy(update={"step": result["step"], "loss": result["loss"]})
        if node.step == "evaluate":
            step = self._results[f"train-{node.trial}"]["step"]
            return entry.model_copy(update={"step": step, "loss": result["metrics"]["loss"]})
        return None
