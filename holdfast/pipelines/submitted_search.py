"""Controller of a search whose trials are runs of a backend.

Each decision is submitted as an ordinary run of the trial's spec with `training.pause_at`. The controller waits for the
run and reads its score from the store. It may be killed at any time. The same command then reads the log, finds an
unfinished run by its name, and submits no trial whose score is in the store. The best trial is submitted once more
without a pause, and its run registers the model.

On one machine, `SearchRunner` adds the nodes of the next trial when the former ones have ended. A decision is in the
store before its training starts, and its score before the next decision.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoint.lineage import newest_step
from holdfast.components.compare import compare
from holdfast.components.compare.step import row_of
from holdfast.corpus import identify
from holdfast.pipelines.backends.interface import SUCCEEDED, RunStatus, is_step
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root
from holdfast.pipelines.runner import Node, Runner, StepBackend, _Running
from holdfast.pipelines.table import START
from holdfast.pipelines.trials import text_of
from holdfast.runtime.environment import store_url
from holdfast.scoring.comparison import BLESSED, Comparison, trials_of
from holdfast.scoring.evaluations import scores_of_pause
from holdfast.search.log import WHOLE, LogEntry, SearchLog, trials_begun
from holdfast.search.method import Search, decide
from holdfast.spec import ExitCode, HoldfastError, Spec
from holdfast.spec.errors import UsageError
from holdfast.store import Store, open_store

log = logging.getLogger("holdfast.search")

POLL_SECONDS = 5.0
PAUSE = "training.pause_at"
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


@dataclass(frozen=True)
class _Trial:
    changes: tuple[str, ...]
    spec: Spec
    run_id: str


def trial_request(request: RunRequest, spec: Spec, until: int) -> RunRequest:
    """The request of one training of a search: of the trial's `spec`, up to step `until`, or WHOLE. Its name is a
    digest of the request, as pauses of one run are different submissions."""
    paused = spec.with_overrides([f"{PAUSE}={spec.training.steps if until == WHOLE else until}"])
    return replace(request, spec=paused, search=None, run_id="", unread="it is a trial of a search")


class SubmittedSearch:
    """The controller of one search. Trials run one after another."""

    def __init__(
        self,
        request: RunRequest,
        submit: Callable[[RunRequest], RunStatus],
        status: Callable[[str], RunStatus],
        report: Callable[[str], None],
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`request`: of the search, with its id. `submit` starts the run of a request, or returns the unfinished run of
        an equal one. `status` is that of a run by the backend's id. `report` gets one line for each event. Raises
        UsageError for a search without an id, and DataError for a damaged log."""
        if not request.run_id:
            message = f"the search needs the ids of its runs here, and they are unknown: {request.unread}"
            raise UsageError(message, "--search", "use --search random, or sources that this machine can read")
        assert request.search is not None
        self._request, self._submit, self._status = request, submit, status
        self._report, self._poll_seconds = report, poll_seconds
        self._search: Search = request.search
        self.store: Store = open_store(store_root(request.store or store_url(request.spec)))
        self._log = SearchLog(self.store, request.run_id)
        self._dataset_id = identify(request.spec)

    def run(self) -> tuple[RunStatus, Comparison | None]:
        """Run the search to its end. Returns the status of the run that decides its exit code, and the comparison.

        A run that fails for another reason than the values of its trial ends the search, without a comparison. Raises
        NoTrialEndedError if no trial has a verdict.
        """
        while (decision := decide(self._search, self._request.spec.training.steps, self._log)) is not None:
            trial = self._trial(self._log.changes_of(decision.trial))
            score = self._score(decision, trial)
            if score is None:
                status = self._run(trial_request(self._request, trial.spec, decision.until), _words(decision))
                score = _failure(decision, status) or self._score(decision, trial)
                if score is None:
                    reason = status.message or f"{status.id} ended as {status.state} without a score"
                    return replace(status, message=reason, exit_code=status.exit_code or int(ExitCode.UNEXPECTED)), None
            self._log.add_score(score)
            self._report(f"{_words(decision)}: {_result(score)}")
        return self._finish()

    def _finish(self) -> tuple[RunStatus, Comparison]:
        """Compare the trials, and let the run of the best one register its model."""
        request, trials = self._request, trials_begun(self._log.entries)
        found = compare(request.spec, self._dataset_id, trials, self.store, request.salt, search=self._log.id)
        if found.best.word != BLESSED:
            status = RunStatus("", self._log.id, request.title, SUCCEEDED, exit_code=int(ExitCode.NOT_BLESSED))
            return status, found
        best = self._trial(found.best.changes)
        status = self._run(replace(request, spec=best.spec, search=None, run_id=best.run_id), "the best trial")
        if not status.exit_code and found.failed:
            status = replace(status, exit_code=int(ExitCode.TRIALS_FAILED))
        return status, found

    def _trial(self, changes: tuple[str, ...]) -> _Trial:
        return _Trial(*next(trials_of(self._request.spec, [changes], self._dataset_id, self._request.salt)))

    def _run(self, request: RunRequest, words: str) -> RunStatus:
        """Submit a run, or find it, and wait until it has ended. An unreachable backend is queried again."""
        status = self._submit(request)
        self._report(f"{words}: runs as {status.id}")
        while status.unfinished:
            time.sleep(self._poll_seconds)
            try:
                status = self._status(status.id)
            except HoldfastError as error:
                if not error.exit_code.retryable:
                    raise
                log.warning("%s: %s; it is queried again", status.id, error)
        return status

    def _score(self, decision: LogEntry, trial: _Trial) -> LogEntry | None:
        """The score of a decision, if the store has it."""
        score = LogEntry(kind="score", trial=decision.trial, until=decision.until)
        if decision.until == WHOLE:
            row = row_of(trial.changes, trial.spec, trial.run_id, self.store)
            return None if row is None else score.model_copy(update={"step": row.step, "loss": row.loss})
        reached = max(decision.until, newest_step(self.store, trial.run_id) or 0)
        max_tokens = trial.spec.evaluation.max_tokens
        found = scores_of_pause(self.store, trial.run_id, (decision.until, reached), max_tokens)
        return None if found is None else score.model_copy(update={"step": found.step, "loss": found.loss})


def _failure(decision: LogEntry, status: RunStatus) -> LogEntry | None:
    """The score of a trial that failed because of its values; None for any other end."""
    failed = next((step.name for step in status.steps if step.exit_code), "train")
    if status.exit_code not in OF_THE_TRIAL or not any(is_step(step, failed) for step in ("train", "evaluate")):
        return None
    return LogEntry(
        kind="score",
        trial=decision.trial,
        until=decision.until,
        exit_code=int(status.exit_code or 0),
        failed_step=failed,
        reason=status.message,
    )


def _words(decision: LogEntry) -> str:
    until = f"to step {decision.until}" if decision.until != WHOLE else "to its last step"
    return f"trial {decision.trial} {until}"


def _result(score: LogEntry) -> str:
    if score.exit_code:
        return f"failed with exit code {score.exit_code}: {score.reason}"
    return "loss not finite" if score.loss is None else f"loss {score.loss:.4f} at step {score.step}"
