"""A forked run shares its past: no byte of it is copied, none is collected, and the following steps are the same."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.checkpoint import Retention, list_pins, open_checkpoint, unpin
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.tools import Side, collect_now, find_divergence, verify
from holdfast.pipelines.backends.record import find_record
from holdfast.pipelines.cli import app
from holdfast.spec import ExitCode
from holdfast.store import Store, layout
from holdfast.telemetry.run_metadata import write_run_metadata
from tests.train.ranks import identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

KEEP = "checkpoint.keep_last=9"
LORA = ("training.lora.rank=4", "model.init_from=w")
CHAT = (
    "data.tokenizer.kind=file",
    "data.tokenizer.path=t.json",
    "data.sources.0.format=jsonl",
    "data.document_masks=true",
)
SLOWER = "training.optimizer.learning_rate=0.005"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return new_store(tmp_path / "store")


def objects(store: Store, run_id: str, *folders: str) -> list[str]:
    return [info.key for folder in folders for info in store.list(layout.run(run_id, f"{folder}/"))]


def train(store: Store, folder: Path, salt: str, *overrides: str) -> None:
    assert train_in_ranks(1, store.url, folder, [((KEEP, *overrides), salt, None)]) == [""]


def fork(store: Store, run: str, step: int, *overrides: str) -> Result:
    changes = [argument for override in overrides for argument in ("--set", override)]
    arguments = ["fork", run, "--to", str(step), *changes, "--store", store.url, "--json"]
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_fork_shares_the_past_and_continues_with_the_same_bits_or_with_its_overrides(
    store: Store, tmp_path: Path
) -> None:
    spec = tiny_spec(KEEP)
    parent = identity_of(spec)
    train(store, tmp_path / "parent", "")
    write_run_metadata(store, parent, spec, DATASET_ID, "")
    output = json.loads(fork(store, parent, 6).stdout)
    child, salt = output["run_id"], output["salt"]
    assert (output["parent"], output["step"]) == (parent, 6)
    assert json.loads(fork(store, parent, 6).stdout) == output, "the same again is the same run"
    assert objects(store, child, "packs", "indexes") == []
    assert [pin.name for pin in list_pins(store, parent)] == [f"forked-{child}"]
    assert json.loads(store.get(layout.parent(child)))["run_id"] == parent
    shown = CliRunner().invoke(app, ["show", child, "--store", store.url]).stdout
    assert f"from step 6 of run {parent}" in shown
    record = find_record(store, child)
    assert record is not None and (record.salt, record.run_id, record.backend) == (salt, child, "local")

    collect_now(store, parent, Retention(1))
    assert checkpoint_steps(store, parent) == [6, 12]
    assert verify(store, child, 6).intact
    other = json.loads(fork(store, child[:8], 6, SLOWER).stdout)  # a name, and a fork of a fork
    assert open_checkpoint(store, other["run_id"], 6).manifest.holder == parent

    train(store, tmp_path / "child", salt)
    assert trained(store, spec, salt) == trained(store, spec)
    assert find_divergence(Side(store, parent), Side(store, child)).none
    train(store, tmp_path / "other", other["salt"], SLOWER)
    divergence = find_divergence(Side(store, parent), Side(store, other["run_id"]))
    assert (divergence.first, divergence.equal_at, divergence.differs_at) == (7, 6, 12)

    collect_now(store, child, Retention(1))
    for pin in list_pins(store, parent):
        unpin(store, parent, pin.step, pin.name)
    store.delete_many(objects(store, parent, "packs", "indexes", "checkpoints"))
    assert verify(store, child, 12).intact, "what it saved itself refers to nothing borrowed"


def test_an_impossible_fork_is_refused_before_any_write(store: Store, tmp_path: Path) -> None:
    spec = tiny_spec(KEEP)
    parent = identity_of(spec)
    train(store, tmp_path / "parent", "")
    write_run_metadata(store, parent, spec, DATASET_ID, "")
    before = sorted(info.key for info in store.list("runs/"))
    for step, overrides, code, message in (
        (
            6,
            ("model.layers=3",),
            ExitCode.BAD_SPEC,
            r"model.layers: is another one .* weights it would begin with \(value: 3\)",
        ),
        (
            6,
            ("training.lora.rank=4", "model.init_from=w"),
            ExitCode.BAD_SPEC,
            r"training.lora.rank: is another one .*\(value: 4\)",
        ),
        (
            6,
            ("training.lora.alpha=8", *LORA),
            ExitCode.BAD_SPEC,
            r"training.lora.alpha: is another one .*\(value: 8.0\)\s+remedy: .* export",
        ),
        (
            6,
            ("data.kind=chat", *CHAT),
            ExitCode.BAD_SPEC,
            r"data.kind: is another one .*\(value: 'chat'\)\s+remedy: .* begin a new one",
        ),
        (
            6,
            ("data.sources.0.uri=other",),
            ExitCode.BAD_SPEC,
            r"data.sources.0.uri: would train another tokenizer .*\(value: 'other'\)",
        ),
        (6, ("data.cleaning.deduplicate=false",), ExitCode.BAD_SPEC, r"data.cleaning.deduplicate: would train"),
        (
            6,
            ("training.gradient_compression=powersgd", "parallel.processes=2"),
            ExitCode.BAD_SPEC,
            r"training.gradient_compression: .* part of the state \(value: 'powersgd'\)\s+remedy: leave it at none",
        ),
        (
            6,
            ("training.gradient_compression=topk", "parallel.processes=2"),
            ExitCode.BAD_SPEC,
            r"training.gradient_compression: .* part of the state \(value: 'topk'\)\s+remedy: leave it at none",
        ),
        (6, ("training.steps=6",), ExitCode.BAD_SPEC, "nothing to train after step 6"),
        (6, ("training.anomalies={action: rewind, rewind_steps: 4}",), ExitCode.BAD_SPEC, "6 is no multiple of it"),
        (7, (), ExitCode.NOT_FOUND, "no checkpoint at step 7"),
    ):
        with pytest.raises(Exception, match=message) as error:
            fork(store, parent, step, *overrides)
        assert error.value.exit_code == code  # type: ignore[attr-defined]
    assert sorted(info.key for info in store.list("runs/")) == before
