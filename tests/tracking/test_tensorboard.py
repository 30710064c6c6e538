"""A run as TensorBoard itself reads it."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from holdfast.spec.errors import MissingError
from holdfast.tracking.tensorboard import FILE, write
from tests.train.tiny_run import tiny_spec

ROWS = [
    {
        "step": step, "time": 1000.0 + step, "loss": 4.0 - step / 8, "state_digest": "ab" * 16,
        "phase_seconds.forward": 0.25, "system.cpu_percent": 50.0,
    }
    for step in range(1, 9)
]  # fmt: skip
VERDICT = {"step": 8, "word": "blessed", "metrics": {"loss": 2.5, "perplexity": float(np.exp(2.5))}}


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_tensorboard_finds_every_step_with_its_time_the_evaluation_and_the_spec(tmp_path: Path) -> None:
    write(tmp_path / "run", tiny_spec(), ROWS, [VERDICT])
    events = read(tmp_path / "run")
    assert [(scalar.step, scalar.wall_time, scalar.value) for scalar in events.Scalars("train/loss")] == [
        (row["step"], row["time"], row["loss"]) for row in ROWS
    ]
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "phase_seconds/forward", "system/cpu_percent", "evaluation/loss", "evaluation/perplexity",
    }  # fmt: skip
    (event,) = events.Scalars("evaluation/loss")
    assert (event.step, event.wall_time, event.value) == (8, 1008.0, 2.5)
    (text,) = events.Tensors("spec")
    assert b"global_batch: 8" in tensor_util.make_ndarray(text.tensor_proto).item()


def test_writing_it_again_leaves_one_file_with_what_there_is_now(tmp_path: Path) -> None:
    first = write(tmp_path, tiny_spec(), ROWS[:4], []).read_bytes()
    content = write(tmp_path, tiny_spec(), ROWS, []).read_bytes()
    assert content.startswith(first)  # so that an open TensorBoard continues where it was
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert len(read(tmp_path).Scalars("train/loss")) == 8


def test_a_run_that_has_saved_nothing_yet_has_a_file_without_steps(tmp_path: Path) -> None:
    write(tmp_path, tiny_spec(), [], [])
    assert read(tmp_path).Tags()["scalars"] == []


def test_a_missing_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingError, match=r"holdfast\[tensorboard\]"):
        write(tmp_path, tiny_spec(), ROWS, [])


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="choose another folder"):
        write(tmp_path / "file", tiny_spec(), ROWS, [])
