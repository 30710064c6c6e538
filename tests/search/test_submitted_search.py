"""The controller of a search on a cluster: it is killed at every submission, and no trial is trained twice."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from holdfast.api.submission import ClusterOptions, request
from holdfast.corpus import identify
from holdfast.pipelines import submitted_search
from holdfast.pipelines.backends.interface import FAILED, RUNNING, SUCCEEDED, RunStatus, StepStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.submitted_search import SubmittedSearch
from holdfast.scoring import settings_key
from holdfast.scoring.comparison import read_comparison
from holdfast.scoring.evaluations import StepScores, write_scores
from holdfast.search.log import LogEntry, read_log
from holdfast.search.method import Search
from holdfast.spec import ExitCode, run_id
from holdfast.spec.errors import ClusterUnreachableError, UsageError
from holdfast.store import Store, layout, open_store

SEARCH = Search("asha", ("training.optimizer.learning_rate=1e-4..1e-1 log",), 2, seed=1, reduction=2, min_steps=4)
WHOLE_STEPS = 8


class Killed(BaseException):
    """The controller is gone."""


@dataclass
class Cluster:
    """A cluster that names a run by its request, and writes the records of its steps when it is queried."""

    store: Store
    dataset_id: str
    kill_at: int = -1  # the number of the submission after which the controller is gone
    codes: dict[str, int] = field(default_factory=dict)  # of trials, by their overrides
    failing: str = "train"  # the step that ends with such a code
    word: str = "blessed"
    unreachable: int = 0  # queries without an answer
    created: list[RunRequest] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    def submit(self, wanted: RunRequest) -> RunStatus:
        name = wanted.key
        if self.states.get(name) != RUNNING:
            self.created.append(wanted)
            self.states[name] = RUNNING
        if len(self.created) - 1 == self.kill_at:
            self.kill_at = -1
            raise Killed
        return RunStatus("slurm", name, wanted.title, RUNNING)

    def status(self, run: str) -> RunStatus:
        if self.unreachable:
            self.unreachable -= 1
            raise ClusterUnreachableError("no answer")
        wanted = next(one for one in reversed(self.created) if one.key == run)
        code = self.codes.get(str(wanted.spec.training.optimizer.learning_rate), 0)
        if code:
            self.states[run] = FAILED
            steps = (StepStatus(self.failing, FAILED, exit_code=code),)
            return RunStatus("slurm", run, "", FAILED, message="loss is NaN", steps=steps, exit_code=code)
        self._train(wanted)
        self.states[run] = SUCCEEDED
        return RunStatus("slurm", run, "", SUCCEEDED, exit_code=0)

    def _train(self, wanted: RunRequest) -> None:
        spec = wanted.spec
        identity, step = run_id(spec, self.dataset_id), spec.training.pause_at or WHOLE_STEPS
        loss = abs(spec.training.optimizer.learning_rate - 1e-3)
        if step < WHOLE_STEPS:
            scores = StepScores(step=step, state_digest="0", max_tokens=spec.evaluation.max_tokens, loss=loss)
            write_scores(self.store, identity, scores)
            return
        self.store.put(layout.result(identity), b'{"step": 8, "loss": 1.5, "state_digest": "00"}')
        verdict = {"metrics": {"loss": loss, "perplexity": 2.0}, "word": self.word}
        self.store.put(layout.verdict(identity, f"{settings_key(spec)}-none"), json.dumps(verdict).encode())


@dataclass(frozen=True)
class Case:
    """A search over a small corpus, and a new store for each controller's history."""

    wanted: RunRequest
    dataset_id: str
    folder: Path

    def cluster(self, name: str) -> Cluster:
        return Cluster(open_store((self.folder / name).as_uri()), self.dataset_id)

    def run(self, cluster: Cluster) -> RunStatus:
        wanted = replace(self.wanted, store=cluster.store.url)
        search = SubmittedSearch(wanted, cluster.submit, cluster.status, lambda _: None, poll_seconds=0)
        return search.run()[0]

    def log(self, cluster: Cluster) -> list[LogEntry]:
        return read_log(cluster.store, self.wanted.run_id)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("search")
    (folder / "corpus.txt").write_text("some words to read\n" * 50)
    spec = folder / "spec.yaml"
    data = f"{{sources: [{{uri: '{folder}/corpus.txt'}}]}}"
    spec.write_text(f"{{name: a, data: {data}, training: {{steps: {WHOLE_STEPS}}}}}")
    wanted = request(spec, backend="slurm", store=folder.as_uri(), over=SEARCH)
    return Case(wanted, identify(wanted.spec), folder)


def pauses(cluster: Cluster) -> list[int | None]:
    return [one.spec.training.pause_at for one in cluster.created]


def test_a_controller_that_is_killed_after_any_submission_trains_nothing_twice(case: Case) -> None:
    calm = case.cluster("calm")
    assert case.run(calm).exit_code == 0
    whole = case.log(calm)
    *trials, last = pauses(calm)
    assert sorted(pause or 0 for pause in trials) == [4, 4, 8]
    assert last is None and calm.created[-1].run_id == calm.created[-1].key, "the best one is an ordinary run"
    comparison = read_comparison(calm.store, case.wanted.run_id)
    assert comparison is not None and comparison.best.run_id == calm.created[-1].run_id
    base = run_id(case.wanted.spec, case.dataset_id)
    assert case.wanted.run_id == SEARCH.identity(base, settings_key(case.wanted.spec))
    for number in range(len(calm.created)):
        cluster = case.cluster(f"kill-{number}")
        cluster.kill_at = number
        with pytest.raises(Killed):
            case.run(cluster)
        assert case.log(cluster) == whole[: len(case.log(cluster))]
        assert case.run(cluster).exit_code == 0
        assert case.log(cluster) == whole
        assert [one.spec for one in cluster.created] == [one.spec for one in calm.created]
    for length in (0, 4):  # killed when a trial has ended, before its score is in the log
        for number in range(length, len(whole)):
            calm.store.delete(layout.sweep(case.wanted.run_id, f"log/{number:05d}.json"))
        before = len(calm.created)
        assert case.run(calm).exit_code == 0
        assert case.log(calm) == whole
        assert pauses(calm)[before:] == [None], "only the best one is submitted, which a backend knows by its run id"


def test_only_a_failure_of_the_values_ends_a_trial_alone(case: Case) -> None:
    calm = case.cluster("reference")
    case.run(calm)
    rate = str(calm.created[1].spec.training.optimizer.learning_rate)
    lost = case.cluster("lost")
    lost.codes[rate] = int(ExitCode.KILLED)
    status = case.run(lost)
    assert (status.exit_code, status.message) == (ExitCode.KILLED, "loss is NaN")
    assert case.log(lost)[-1].kind == "decision"
    lost.codes.clear()
    assert case.run(lost).exit_code == 0
    assert case.log(lost) == case.log(calm)
    failing = case.cluster("failing")
    failing.codes[rate] = int(ExitCode.DIVERGED)
    assert case.run(failing).exit_code == ExitCode.TRIALS_FAILED
    (failed,) = (entry for entry in case.log(failing) if entry.exit_code)
    assert (failed.failed_step, failed.reason, failed.loss) == ("train", "loss is NaN", None)


def test_a_failure_before_the_training_is_not_one_of_the_values(case: Case) -> None:
    reference = case.cluster("prepared")
    case.run(reference)
    rate = str(reference.created[0].spec.training.optimizer.learning_rate)
    cluster = case.cluster("unprepared")
    cluster.codes[rate], cluster.failing = int(ExitCode.BAD_DATA), "preprocess"
    assert case.run(cluster).exit_code == ExitCode.BAD_DATA
    assert [entry.kind for entry in case.log(cluster)] == ["decision"]


def test_no_blessed_trial_registers_nothing_and_an_unreachable_cluster_is_queried_again(case: Case) -> None:
    cluster = case.cluster("bad")
    cluster.word, cluster.unreachable = "not_blessed", 3
    assert case.run(cluster).exit_code == ExitCode.NOT_BLESSED
    assert None not in pauses(cluster)


def test_a_run_without_its_score_ends_the_search(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = case.cluster("silent")
    monkeypatch.setattr(Cluster, "_train", lambda *_: None)
    status = case.run(cluster)
    assert status.exit_code == ExitCode.UNEXPECTED
    assert "ended as SUCCEEDED without a score" in status.message


def test_a_search_that_cannot_run_is_refused_by_name(case: Case) -> None:
    unknown = replace(case.wanted, run_id="", unread="it is on a volume of the pods")
    with pytest.raises(UsageError, match="unknown: it is on a volume"):
        SubmittedSearch(unknown, lambda _: pytest.fail(), lambda _: pytest.fail(), print)
    for backend, options in (("ssh", ClusterOptions()), ("slurm", ClusterOptions(concurrent_trials=2))):
        with pytest.raises(UsageError, match="search by asha"):
            request(case.folder / "spec.yaml", backend=backend, over=SEARCH, options=options)
    assert submitted_search.trial_request(case.wanted, case.wanted.spec, 2).spec.training.pause_at == 2
