"""The train step as a command: trains once, however often and by however many it is asked."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from holdfast.components.checkpoint import list_attempts
from holdfast.components.spec import ExitCode, run_id
from holdfast.components.spec.errors import DataError
from holdfast.components.store import layout
from holdfast.components.train import run
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec


@pytest.mark.slow
def test_two_commands_at_once_train_once_and_a_third_answers_at_once(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    both = [start_training(spec, store.url, tmp_path / "home") for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    results = [json.loads(text.splitlines()[-1]) for text in printed]
    assert results[0] == results[1]
    assert [number for number, _ in list_attempts(store, run_id(spec, DATASET_ID))] == [1]
    assert sum("already trained" in text for text in printed) == 1
    result = run(spec, DATASET_ID, store)
    assert result.model_dump(mode="json") == results[0]


@pytest.mark.slow
def test_a_command_that_is_asked_to_leave_says_preempted_and_goes_on_when_it_is_repeated(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("training.steps=300", "checkpoint.every_steps=300")
    process = start_training(spec, store.url, tmp_path / "home")
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if " progress step=" in line:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # a person and a scheduler at the same moment
            break
    printed += process.communicate(timeout=120)[0]
    assert process.returncode == ExitCode.PREEMPTED, printed
    assert "run the same command again" in printed
    assert store.stat(layout.result(run_id(spec, DATASET_ID))) is None
    assert any(store.list(layout.run(run_id(spec, DATASET_ID), "checkpoints/step-")))


def test_a_result_that_is_damaged_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    key = layout.result(run_id(spec, DATASET_ID))
    for damage in (b"", b"{", b"{}", b'{"run_id": 3}', b"\xff"):
        store.put(key, damage)
        with pytest.raises(DataError, match=f"{key} in file://.* is damaged: delete it and run the same command again"):
            run(spec, DATASET_ID, store)
