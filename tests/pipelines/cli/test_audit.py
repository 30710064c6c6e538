"""The audit commands: their output and their exit codes."""

import json
from pathlib import Path

import pytest

from holdfast.corpus import prepare
from holdfast.pipelines.cli import audit
from holdfast.spec import parse_spec, run_id
from holdfast.spec.errors import ExitCode, MissingError, StoreUnreachableError
from holdfast.store import layout, open_store
from tests.checkpoint.tools.test_first_divergence import write
from tests.pipelines.cli.test_runs import holdfast


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_STORE", f"file://{tmp_path}/store")


def test_diff_ends_with_0_or_6_and_names_step_tensor_and_element(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for name, parts_at in (("one", 99), ("same", 99), ("other", 5)):
        write(store, name, [3, 6], parts_at)
    store.put(layout.run("other", "run.json"), json.dumps({"spec": {"training": {"seed": 1}}}).encode())
    same = holdfast("audit", "diff", "one", "same")
    assert (same.exit_code, "6 steps are the same bit for bit" in same.stdout) == (ExitCode.OK, True)
    other = holdfast("audit", "diff", "one", "other")
    assert other.exit_code == ExitCode.MISMATCH
    for text in ("training.seed: not set, and 1", "part at step 5", "still equal at step 3", "of step 6", "[2, 3]"):
        assert text in other.stdout, text
    output = json.loads(holdfast("audit", "diff", "one", "other", "--json").stdout)
    assert (output["equal"], output["divergence"]["first"], output["divergence"]["differs_at"]) == (False, 5, 6)
    other_store = open_store(f"file://{tmp_path}/elsewhere")
    write(other_store, "one", [3, 6])
    assert holdfast("audit", "diff", "one", "one", "--other-store", other_store.url).exit_code == ExitCode.OK


def test_audit_batch_prints_the_rows_of_a_step_with_files_and_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text that is read again and again " * 40)
    spec = parse_spec(f"""
        name: small
        data: {{sources: [{{uri: "{tmp_path}/text.txt"}}], tokenizer: {{vocabulary: 300}}}}
        model: {{layers: 1, hidden: 32, heads: 2, context: 16}}
        training: {{steps: 5, global_batch: 4, micro_batch: 2}}
    """)
    store = open_store(f"file://{tmp_path}/store")
    dataset_id = prepare(spec, store).dataset_id
    identity = run_id(spec, dataset_id)
    document = {"spec": spec.model_dump(mode="json"), "dataset_id": dataset_id}
    store.put(layout.run(identity, "run.json"), json.dumps(document).encode())
    output = json.loads(holdfast("audit", "batch", identity, "5", "--json").stdout)
    assert [len(row["tokens"]) for row in output["rows"]] == [17] * 4
    page = holdfast("audit", "batch", "small", "5", "--micro-batch", "1", "--text").stdout
    assert f"{tmp_path}/text.txt, its tokens" in page
    assert "row 2, micro-batch 1" in page and "row 1," not in page
    assert output["rows"][3]["text"] in page
    assert "again" in output["rows"][3]["text"]


def test_replay_takes_steps_without_a_sample() -> None:
    with pytest.raises(MissingError, match="has no runs yet"):
        holdfast("audit", "replay", "nope", "--steps", "1-2")


def test_a_sample_of_a_store_that_does_not_answer_is_no_empty_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise StoreUnreachableError("no answer")

    write(open_store(f"file://{tmp_path}/store"), "one", [3])
    monkeypatch.setattr(audit, "replayable_spec", unreachable)
    with pytest.raises(StoreUnreachableError, match="no answer"):
        holdfast("audit", "replay", "--sample", "1")
