"""`holdfast checkpoints`: the output and the exit code of each command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast.checkpoint.retention import checkpoint_times
from holdfast.model.initialise import parameter_shapes
from holdfast.pipelines.cli import app
from holdfast.pipelines.view.run_record import read_run
from holdfast.spec import parse_spec
from holdfast.store import Store, open_store
from tests import warm
from tests.checkpoint.saving import RUN, checkpointer, pack_of, save, state, whole
from tests.whole.small import environment

COMMANDS = ["list", "show", "verify", "diff", "pin", "unpin", "gc", "export", "import"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with checkpoints at the steps 3 and 6 of a run."""
    store = open_store(f"file://{tmp_path_factory.mktemp('store')}")
    writer = checkpointer(store)
    save(writer, 3)
    save(writer, 6)
    return store


def holdfast(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "checkpoints", *arguments]
    return warm.run(command, environment(folder), folder)


def output_of(store: Store, tmp_path: Path, *arguments: str, code: int = 0) -> str:
    """The output of `holdfast checkpoints`, which must exit with `code`."""
    result = holdfast(tmp_path, *arguments, "--store", store.url)
    assert result.returncode == code, result.stderr
    return result.stdout if code in (0, 6, 13) else result.stderr


def as_json(store: Store, tmp_path: Path, *arguments: str, code: int = 0) -> Any:
    return json.loads(output_of(store, tmp_path, *arguments, "--json", code=code))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_group_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, ["checkpoints", command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert f"Example: holdfast checkpoints {command}" in result.stdout


def test_the_list_and_a_page_of_one(saved: Store, tmp_path: Path) -> None:
    listing = output_of(saved, tmp_path, "list", RUN)
    assert "one of the newest 3" in listing
    output = as_json(saved, tmp_path, "list", RUN)
    assert [(checkpoint["step"], checkpoint["attempt"], checkpoint["kept"]) for checkpoint in output] == [
        (3, 1, ["one of the newest 3"]),
        (6, 1, ["one of the newest 3"]),
    ]
    assert output[1]["fresh"] < output[1]["bytes"]
    page = output_of(saved, tmp_path, "show", f"{RUN}@6")
    assert output[1]["state_digest"] in page
    assert "matrix" in page and "[7, 5]" in page
    assert as_json(saved, tmp_path, "show", RUN)["step"] == 6  # the newest


def test_a_missing_checkpoint_is_reported_with_the_existing_ones(saved: Store, tmp_path: Path) -> None:
    assert "it has: 3, 6" in output_of(saved, tmp_path, "verify", f"{RUN}@4", code=15)
    assert f"{RUN}@6" in output_of(saved, tmp_path, "show", f"{RUN}@last", code=2)
    for command in ("list", "gc"):
        output = " ".join(output_of(saved, tmp_path, command, f"{RUN}@6", code=2).replace("│", " ").split())
        assert f"write {RUN}. To show the checkpoint: holdfast checkpoints show {RUN}@6" in output


def test_verify_names_the_object_and_the_tensor_and_ends_with_13(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    writer = checkpointer(store)
    save(writer, 3)
    save(writer, 6)
    whole_run = output_of(store, tmp_path, "verify", RUN)
    assert "step 3: intact" in whole_run and "step 6: intact" in whole_run
    key, start = pack_of(store, 6)
    data = bytearray(store.get(key))
    data[start] ^= 1
    store.put(key, bytes(data))
    output = output_of(store, tmp_path, "verify", RUN, code=13)
    assert "step 3: intact" in output
    assert "step 6: DAMAGED" in output
    assert f"{key} (matrix)" in output
    damage = as_json(store, tmp_path, "verify", f"{RUN}@6", code=13)[0]["damages"][0]
    assert (damage["key"], damage["tensor"]) == (key, "matrix")


@pytest.mark.parametrize("damaged", [3, 6])
def test_damage_of_an_older_checkpoint_of_a_run_ends_verify_with_13(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store = open_store(f"file://{tmp_path / 'store'}")
    writer = checkpointer(store)
    for step in (3, 6, 9):
        save(writer, step, whole({"matrix": state(step)["matrix"]}))  # no checkpoint needs a pack of another one
    store.put(pack_of(store, damaged)[0], b"?" * 4096)
    result = CliRunner().invoke(app, ["checkpoints", "verify", RUN, "--store", store.url, "--json"])
    assert result.exit_code == 13, result.output
    assert [bool(checkpoint["damages"]) for checkpoint in json.loads(result.stdout)] == [
        step == damaged for step in (3, 6, 9)
    ]
    newest = CliRunner().invoke(app, ["checkpoints", "verify", f"{RUN}@9", "--store", store.url])
    assert newest.exit_code == 0, newest.output


def test_diff_exits_with_6_and_prints_the_first_differing_element(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    save(checkpointer(store), 3)
    other = open_store(f"file://{tmp_path / 'other'}")
    changed = state(3)
    changed["matrix"].view(torch.int32)[2, 1] += 2
    save(checkpointer(other), 3, whole(changed))
    assert "equal: both have the state digest" in output_of(store, tmp_path, "diff", RUN, f"{RUN}@3")
    output = output_of(store, tmp_path, "diff", RUN, RUN, "--other-store", other.url, code=6)
    assert "1 of 35" in output and "[2, 1]" in output
    comparison = as_json(store, tmp_path, "diff", RUN, RUN, "--other-store", other.url, code=6)
    assert comparison["equal"] is False
    (tensor,) = comparison["difference"]["tensors"]
    assert (tensor["name"], tensor["first"], tensor["ulps"]) == ("matrix", [2, 1], 2)


def test_a_checkpoint_exported_for_torch_is_imported_as_a_new_run(saved: Store, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    (tmp_path / "text.txt").write_text("a few words " * 100)
    spec.write_text(
        "name: tiny\ndata: {sources: [{uri: text.txt}]}\n"
        "model: {layers: 1, hidden: 16, heads: 2, kv_heads: 1, context: 8}\ntraining: {steps: 9}\n"
    )
    shapes = parameter_shapes(parse_spec(spec.read_text()).model, 300)
    store = open_store(f"file://{tmp_path / 'store'}")
    save(checkpointer(store), 3, whole({name: torch.randn(shape) for name, shape in shapes.items()}))
    output_of(store, tmp_path, "export", RUN, str(tmp_path / "dcp"), "--to", "dcp")
    arguments = ["import", str(spec), str(tmp_path / "dcp"), "--from", "dcp", "--step", "3", "--set", "training.seed=5"]
    result = holdfast(tmp_path, *arguments, "--store", store.url, "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert (output["step"], output["moments"], output["again"]) == (3, False, False)
    second_result = holdfast(tmp_path, *arguments, "--store", store.url)
    assert f"run {output['run_id']} already has" in second_result.stdout
    expected = f"holdfast run {spec} --set training.seed=5 --store {store.url} --salt {output['salt']}"  # the same run
    assert expected in " ".join(second_result.stdout.split())
    assert as_json(store, tmp_path, "show", output["run_id"])["state_digest"] == output["state_digest"]
    difference = as_json(store, tmp_path, "diff", RUN, output["run_id"], code=6)["difference"]
    assert difference["tensors"] == []
    assert all(name.startswith("optimizer.") for name in difference["only_other"])


@pytest.mark.slow
def test_a_pin_protects_and_is_listed_until_it_is_removed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    writer = checkpointer(store, keep_last=1)
    save(writer, 1)
    output_of(store, tmp_path, "pin", f"{RUN}@1", "--reason", "the figures")
    save(writer, 2)
    assert list(checkpoint_times(store, RUN)) == [1, 2]
    assert "pinned by person: the figures" in output_of(store, tmp_path, "list", RUN)
    writer_of_five = checkpointer(store, 1, keep_last=9)
    for step in (3, 4, 5):
        save(writer_of_five, step)
    rehearsed = as_json(store, tmp_path, "gc", RUN, "--dry-run")
    assert rehearsed["steps"] == [2]  # three newest by default, and the pinned one
    would = output_of(store, tmp_path, "gc", RUN, "--dry-run")
    assert would.startswith("would delete the checkpoint of step 2, and what nothing else needs: ")
    assert "nothing was deleted" in would
    before = read_run(store, RUN)
    assert before is not None
    assert output_of(store, tmp_path, "gc", RUN).startswith("deleted the checkpoint of step 2, and what")
    assert output_of(store, tmp_path, "gc", RUN).startswith("deleted nothing: retention keeps every checkpoint")
    output_of(store, tmp_path, "pin", f"{RUN}@4")
    output_of(store, tmp_path, "unpin", f"{RUN}@4")
    output_of(store, tmp_path, "pin", f"{RUN}@5")
    after = read_run(store, RUN)
    assert after is not None
    assert after.changed == before.changed  # the run itself wrote nothing
    assert list(checkpoint_times(store, RUN)) == [1, 3, 4, 5]
    output_of(store, tmp_path, "unpin", f"{RUN}@5")
    output_of(store, tmp_path, "unpin", f"{RUN}@1")
    assert "is not pinned by person" in output_of(store, tmp_path, "unpin", f"{RUN}@1", code=15)
    save(writer, 6)
    assert list(checkpoint_times(store, RUN)) == [6]
