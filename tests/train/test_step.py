"""The train step as a command: it trains once, for any number of repeated or concurrent calls."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint import list_attempts
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.components.train import run
from holdfast.components.train.following import _pass_on
from holdfast.components.train.step import _describe, _unsaved
from holdfast.launch.interface import UNSAVED, GangExit
from holdfast.spec import ExitCode, run_id
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import layout
from holdfast.telemetry import read_events
from holdfast.telemetry.channel import emit
from holdfast.telemetry.event_log import PipeEvents, StoreEvents, recording
from holdfast.telemetry.events import Event, Progress, SaveCommitted, WarningIssued
from tests.faults.killing import HELD_TRAINING, Output, followed, held_at, wait_for_victim
from tests.faults.nodes import PATIENCE
from tests.train.ranks import train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, new_store, start_training, tiny_spec, train_once


@pytest.mark.slow
def test_two_concurrent_commands_train_once_and_a_third_returns_the_result(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    processes = [start_training(spec, store.url, tmp_path / "home") for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    results = [json.loads(text.splitlines()[-1]) for text in outputs]
    assert results[0] == results[1]
    assert [number for number, _ in list_attempts(store, run_id(spec, DATASET_ID))] == [1]
    assert sum("already trained" in text for text in outputs) == 1
    result = run(spec, DATASET_ID, store)
    assert result.model_dump(mode="json") == results[0]


@pytest.mark.slow
def test_a_command_stopped_by_a_signal_exits_as_preempted_and_resumes_when_repeated(tmp_path: Path) -> None:
    patient = ("training.steps=20", "checkpoint.every_steps=20", "checkpoint.grace_seconds=300")
    store, spec = new_store(tmp_path / "store"), tiny_spec(*patient)
    gate = held_at(10, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        output.wait_for_step(1)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # a person and a scheduler at the same moment
        code = process.wait(PATIENCE)
        reader.join()
    printed = "".join(output.lines)
    assert code == ExitCode.PREEMPTED, printed
    assert "run the same command again" in printed
    assert store.stat(layout.result(run_id(spec, DATASET_ID))) is None
    (saved_step,) = checkpoint_steps(store, run_id(spec, DATASET_ID))
    assert f"resuming from step {saved_step}" in train_once(spec, store.url, tmp_path / "home")
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(patient, "undisturbed", None)]) == [""]
    assert trained(store, spec) == trained(store, spec, "undisturbed")


@pytest.mark.slow
def test_a_stop_whose_grace_is_too_short_for_a_save_names_the_setting(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("training.steps=20", "checkpoint.grace_seconds=1")
    gate = held_at(10, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        output.wait_for_step(1)
        wait_for_victim(psutil.Process(process.pid), "rank0").suspend()  # it cannot save
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
        reader.join()
    printed = "".join(output.lines)
    assert code == ExitCode.TERMINATED, printed
    assert f"{UNSAVED} = 1; run the same command again" in printed


def test_only_a_gang_that_was_stopped_and_killed_needed_more_time_for_its_save() -> None:
    spec = tiny_spec("checkpoint.grace_seconds=7")
    killed, left = GangExit(ExitCode.KILLED, ()), GangExit(ExitCode.TERMINATED, ())
    assert _unsaved(spec, killed, [True]) == f"; {UNSAVED} = 7"
    assert (_unsaved(spec, killed, [False]), _unsaved(spec, killed, []), _unsaved(spec, left, [True])) == ("", "", "")


GARBAGE = """
import json
print("2026-11-20T12:04:45Z INFO holdfast.train: progress step=999/1000 loss=0.1", flush=True)
print("2026-11-20T12:04:45Z INFO holdfast.train: step 999/1000 (99 %)  loss 0.1000", flush=True)
print(json.dumps({"time": 1.5, "level": "INFO", "logger": "holdfast.train", "message": "step 998/1000"}), flush=True)
print(json.dumps({"v": 1, "kind": "progress", "writer": "w", "number": 1, "step": 997, "steps": 1000}), flush=True)
"""


@pytest.mark.slow
def test_progress_does_not_depend_on_the_log_format_or_the_output_of_ranks(tmp_path: Path) -> None:
    spec, curves = tiny_spec("training.log_every=1"), []
    (tmp_path / "sitecustomize.py").write_text(GARBAGE)
    noisy = {"HOLDFAST_LOG": "json", "PYTHONPATH": str(tmp_path)}
    for name in ("plain", "noisy"):
        store, argo = new_store(tmp_path / name / "store"), tmp_path / name / "progress"
        environment = {"ARGO_PROGRESS_FILE": str(argo), **(noisy if name == "noisy" else {})}
        process = start_training(spec, store.url, tmp_path / name, environment=environment)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        assert name == "plain" or "999/1000" in output
        events = PipeEvents(tmp_path / name / PIPE_FILE).new()
        assert read_events(store, run_id(spec, DATASET_ID)) == events
        curves.append([(event.step, event.loss) for event in events if isinstance(event, Progress)])
        assert argo.read_text() == f"{spec.training.steps}/{spec.training.steps}\n"
        kinds = [event.kind for event in events if event.notable and event.kind != "save_committed"]
        assert kinds == [
            "step_began", "launch_began", "attempt_began", "rank_ended", "launch_ended", "step_ended",
        ]  # fmt: skip
        assert sum(event.kind == "save_committed" for event in events) == spec.training.steps // 3
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == list(range(1, spec.training.steps + 1))


def test_a_damaged_result_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    key = layout.result(run_id(spec, DATASET_ID))
    for damage in (b"", b"{", b"{}", b'{"run_id": 3}', b"\xff"):
        store.put(key, damage)
        with pytest.raises(DataError, match=f"file://.*{key}: is damaged .*; delete it and run the same command again"):
            run(spec, DATASET_ID, store)


def test_a_failing_event_mirror_is_logged_and_following_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def take(self, event: Event, *, steps: bool) -> None:
            raise ValueError("no such span")

    store, identity = new_store(tmp_path / "store"), "0123456789abcdef"
    with recording(store, identity, "rank 0", launch=1):
        emit(WarningIssued(message="the first"))
        emit(SaveCommitted(step=70, seconds=1.5, stall_seconds=0.1, bytes=10**6))
    with caplog.at_level("INFO", logger="holdfast"):
        assert _pass_on(StoreEvents(store, identity), None, Broken())  # type: ignore[arg-type]
    assert caplog.text.count("events are not passed on: ValueError: no such span") == 2
    assert "saved step 70" in caplog.text, "what follows the one that breaks it is passed on"


def test_a_task_file_that_is_not_there_is_known_before_the_training(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("evaluation.tasks=[{uri: nowhere.yaml}]")
    with pytest.raises(MissingError, match=r"there is no task file nowhere\.yaml"):
        run(spec, DATASET_ID, store)
    assert not list(store.list("runs/"))


def test_the_error_of_a_launch_ends_with_the_message_of_the_rank_and_not_with_that_of_torchrun() -> None:
    tail = (
        "ERROR   holdfast: mine.py:focal: returned torch.float32 []",
        "E1126 14:07:04.109000 491 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 22)",
    )
    assert _describe(GangExit(ExitCode.USER_CODE, tail), "a", "").endswith(f"the end of the log:\n    {tail[0]}")
