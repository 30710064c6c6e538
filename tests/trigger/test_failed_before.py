"""A schedule does not repeat a retraining at each firing if it fails for a permanent reason."""

from pathlib import Path

import pytest

from holdfast.components.preprocess.__main__ import body as preprocess
from holdfast.components.trigger import Decision
from holdfast.components.trigger.__main__ import body
from holdfast.corpus import identify
from holdfast.spec import Spec, dump_spec, parse_spec
from holdfast.spec.errors import DataError, ExitCode
from holdfast.steps.outcomes import Outcome
from holdfast.store import Store, layout, open_store
from tests import empty_mlflow

FIRST, SECOND = "0b7e1d2c-0001", "0b7e1d2c-0002"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    empty_mlflow.place(tmp_path / "home")
    (tmp_path / "one.txt").write_text("the only document of this corpus, " * 400)
    source = f"{{sources: [{{uri: {tmp_path}/one.txt}}], tokenizer: {{vocabulary: 300}}, workers: 1}}"
    return parse_spec(f"{{name: small, model: {{context: 32}}, data: {source}}}")


def fire(spec: Spec, store: Store, job: str) -> Decision:
    """The decision of the trigger step in one firing."""
    return Decision.model_validate(body(spec, store.url, salt="", job=job).result)


def ended(store: Store, job: str, step: str, code: int, reason: str = "") -> None:
    outcome = Outcome(step, 1, 1.0, ended=2.0, exit_code=code, reason=reason)
    store.put(layout.job(job, step), outcome.as_json())


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (ExitCode.BAD_SPEC, False),
        (ExitCode.BAD_DATA, False),
        (ExitCode.CANCELLED, True),
        (ExitCode.STORE_UNREACHABLE, True),
    ],
)
def test_a_failure_that_stays_waits_for_a_change_and_any_other_is_tried_again(
    spec: Spec, tmp_path: Path, code: ExitCode, again: bool
) -> None:
    store = open_store((tmp_path / "store").as_uri())
    first = fire(spec, store, FIRST)
    assert first.word == "due"
    ended(store, FIRST, "trigger", 0)
    ended(store, FIRST, "train", code, "the reason")
    ended(store, FIRST, "notify", 1, "a webhook that is away is no failure of the training")
    second = fire(spec, store, SECOND)
    assert second.word == ("due" if again else "not_due")
    if again:
        return
    assert second.conditions[-1].name == "failed"
    assert f"failed at train with code {int(code)} (the reason)" in second.reason
    assert fire(spec, store, "0b7e1d2c-0003").word == "not_due"  # nor at any later firing
    changed = parse_spec(dump_spec(spec), ["cluster.resources.memory=64Gi"])  # not in the run id
    assert fire(changed, store, "0b7e1d2c-0004").word == "due"
    (tmp_path / "one.txt").write_text("another text " * 400)
    assert fire(spec, store, "0b7e1d2c-0005").word == "due"


def test_a_retraining_that_was_repaired_by_hand_is_no_failure_any_more(spec: Spec, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    fire(spec, store, FIRST)
    ended(store, FIRST, "train", ExitCode.BAD_DATA)
    assert fire(spec, store, SECOND).word == "not_due"
    ended(store, FIRST, "train", ExitCode.OK)  # a retry in the UI, after an external fix
    assert fire(spec, store, SECOND).word == "due"


def test_a_manual_trigger_starts_nothing_and_hides_no_failure(spec: Spec, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    fire(spec, store, FIRST)
    ended(store, FIRST, "train", ExitCode.BAD_DATA)
    assert fire(spec, store, "").word == "not_due"
    assert fire(spec, store, SECOND).word == "not_due"


def test_preprocess_itself_refuses_text_of_which_nothing_can_be_held_out(spec: Spec, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    with pytest.raises(DataError, match="all text is one document, and a document is held out as a whole: split it"):
        preprocess(spec, store.url)
    assert preprocess(spec, store.url, trials="[[], []]").result["dataset_id"] == identify(spec)  # they may differ


@pytest.mark.slow
def test_preprocess_itself_refuses_a_source_shorter_than_one_sample(spec: Spec, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"short-{number}.txt").write_text(f"a few words of document {number}")
    short = f"data.sources=[{{uri: '{tmp_path}/short-*.txt'}}]"
    changed = parse_spec(dump_spec(spec), [short, "data.validation_fraction=0.9", "model.context=256"])
    with pytest.raises(DataError, match=r"training tokens are fewer than one sample of 256 \+ 1"):
        preprocess(changed, (tmp_path / "store").as_uri())
