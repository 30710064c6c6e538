"""One rank as a separate process: how it exits, and what it leaves in the store."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.collectives import Gang
from holdfast.dataset import Dataset
from holdfast.launch.exits import FOLDER_VARIABLE, node_exit_of, read_ranks
from holdfast.model.initialise import initial_tensor, parameter_shapes
from holdfast.rank.setup import batches
from holdfast.spec import ExitCode, run_id
from holdfast.store import Store, open_store
from tests import warm
from tests.model.exporting import write_hugging_face
from tests.train.ranks import identity_of, launch, train_in_ranks, trained
from tests.train.tiny_run import (
    DATASET_ID,
    END_OF_TEXT,
    SECOND_SOURCE,
    VOCABULARY,
    new_store,
    tiny_assignment,
    tiny_spec,
    write_dataset,
)


def start(store: Store, identity: str, number: int, home: Path) -> subprocess.Popen[str]:
    """Start a rank of a launch, as torchrun does."""
    command = [sys.executable, "-m", "holdfast.rank.worker", "--run-id", identity]
    command += ["--launch", str(number), "--store", store.url]
    environment = {**os.environ, "HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    return warm.popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the complete log."""
    _, log = process.communicate(timeout=300)
    return process.returncode, log


def test_a_diverged_run_ends_permanently_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    spec = tiny_spec("training.optimizer.learning_rate=1e9", "training.log_every=1000", "checkpoint.every_steps=1")
    for attempt in (1, 2):
        code, log = finish(start(store, identity_of(spec), launch(store, spec), tmp_path))
        assert code == ExitCode.DIVERGED, log
        assert f"attempt {attempt}: {'starting' if attempt == 1 else 'resuming'}" in log
        assert "step 2: loss" in log
        assert "the last checkpoint is kept. Lower training.optimizer.learning_rate" in log
        assert checkpoint_steps(store, run_id(spec, DATASET_ID)) == [1]
    checkpoint = open_checkpoint(store, run_id(spec, DATASET_ID), 1)
    assert all(checkpoint.tensor(name).isfinite().all() for name in checkpoint.tensors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_attempt_and_the_next_one_resumes_with_free_space(
    tmp_path: Path, small_disk: Path
) -> None:
    reference = new_store(tmp_path / "store")
    spec = tiny_spec("checkpoint.keep_last=1")
    assert train_in_ranks(1, reference.url, tmp_path / "ranks", [((), "", None)]) == [""]
    store = new_store(small_disk / "store")
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"x" * (free - 700_000))  # room for one checkpoint, but not for a second one
    code, log = finish(start(store, identity_of(spec), launch(store, spec), tmp_path / "home"))
    assert code == ExitCode.NO_SPACE, log
    assert "No space left on device" in log
    assert checkpoint_steps(store, run_id(spec, DATASET_ID)) == [3]
    filler.unlink()
    code, log = finish(start(store, identity_of(spec), launch(store, spec), tmp_path / "home"))
    assert code == ExitCode.OK, log
    assert "resuming from step 3" in log
    assert trained(store, spec) == trained(reference, tiny_spec())


def write_weights(folder: Path, store: Store, seed: int) -> dict[str, tuple[int, ...]]:
    """Write random weights in the Hugging Face layout. Returns the shapes by name."""
    folder.mkdir(exist_ok=True)
    shape = tiny_spec().model
    shapes = parameter_shapes(shape, VOCABULARY)
    write_hugging_face(
        folder, shape, VOCABULARY,
        ((name, initial_tensor(name, size, shape, seed)) for name, size in shapes.items()),
        tokenizer_json=store.get(f"datasets/{DATASET_ID}/tokenizer.json").decode(), end_of_text=END_OF_TEXT,
    )  # fmt: skip
    return shapes


def test_weights_that_change_between_the_launch_and_the_ranks_are_refused(tmp_path: Path) -> None:
    folder, store = tmp_path / "weights", new_store(tmp_path / "store")
    write_weights(folder, store, seed=99)
    spec = tiny_spec(f"model.init_from={folder}", "checkpoint.every_steps=1")
    number, identity = launch(store, spec), identity_of(spec)
    write_weights(folder, store, seed=98)
    code, log = finish(start(store, identity, number, tmp_path))
    assert code == ExitCode.BAD_DATA, log
    assert f"model.init_from: {folder} holds other weights" in log
    assert checkpoint_steps(store, identity) == []
    write_weights(folder, store, seed=99)
    code, log = finish(start(store, identity, number, tmp_path))
    assert code == ExitCode.OK, log
    write_weights(folder, store, seed=98)  # from here on, only the checkpoint counts
    code, log = finish(start(store, identity, number, tmp_path))
    assert code == ExitCode.OK, log


def test_a_rank_that_computes_wrong_blames_its_node(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.odd_worker", "computes-wrong", "--run-id", "run", "--launch", "1"]
    command += ["--store", f"file://{tmp_path}/store"]
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path), FOLDER_VARIABLE: str(tmp_path)}
    assert warm.run(command, environment).returncode == ExitCode.WRONG_ARITHMETIC
    ending = node_exit_of(read_ranks(tmp_path), [])
    assert (ending.code, ending.blames_node) == (ExitCode.WRONG_ARITHMETIC, True)


def test_the_exit_of_a_gang_has_the_error_of_the_rank_that_refuses_the_weights(tmp_path: Path) -> None:
    folder, store = tmp_path / "weights", new_store(tmp_path / "store")
    write_weights(folder, store, seed=99)
    spec = tiny_spec(f"model.init_from={folder}", "parallel.processes=2")
    number, identity = launch(store, spec), identity_of(spec)
    write_weights(folder, store, seed=98)
    command = [sys.executable, "-m", "holdfast.launch.torchrun", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "holdfast.rank.worker", "--run-id", identity]
    command += ["--launch", str(number), "--store", store.url]
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    gang = warm.run(command, environment)
    assert gang.returncode == ExitCode.BAD_DATA, gang.stderr
    assert f"model.init_from: {folder} holds other weights" in gang.stdout  # ranks' output is forwarded to it
    assert checkpoint_steps(store, identity) == []


def test_training_starts_from_imported_weights(tmp_path: Path) -> None:
    folder, store = tmp_path / "weights", new_store(tmp_path / "store")
    shape, shapes = tiny_spec().model, write_weights(folder, store, seed=99)
    one_step = (
        "training.steps=1",
        "training.schedule.warmup_steps=0",
        "training.optimizer.learning_rate=1e-30",
        "training.optimizer.weight_decay=0",
    )
    imported = (*one_step, f"model.init_from={folder}")
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(imported, "", None), (one_step, "", None)]) == [""] * 2
    for overrides, seed in ((imported, 99), (one_step, 0)):
        checkpoint = open_checkpoint(store, identity_of(tiny_spec(*overrides)), 1)
        for name, size in shapes.items():
            assert torch.equal(checkpoint.tensor(name), initial_tensor(name, size, shape, seed)), name


@pytest.mark.parametrize(("weights", "share_of_second"), [((1, 3), 0.75), ((3, 1), 0.25), ((1, 1), 0.5)])
def test_the_weights_of_a_mixture_reach_training(
    tmp_path: Path, weights: tuple[int, int], share_of_second: float
) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_dataset(store, sources=2)
    sources = ", ".join(f"{{uri: synthetic-{number}, weight: {weight}}}" for number, weight in enumerate(weights))
    assignment = tiny_assignment(f"data.sources=[{sources}]")
    training, rows = batches(assignment, Dataset.open(store, DATASET_ID, tmp_path), Gang())
    from_second = np.concatenate([(training.batch(step, rows) == SECOND_SOURCE).all(axis=1) for step in range(200)])
    assert abs(float(from_second.mean()) - share_of_second) < 0.04  # random, but the same in every run


@pytest.mark.drill
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_model_resumes_to_the_same_bits(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    compiled = ("training.compile=true", "model.layers=1", "training.steps=6")
    first = train_in_ranks(1, store.url, tmp_path / "first", [(compiled, "", None), (compiled, "stopped", 2)])
    assert first == ["", "PreemptedError"]
    assert train_in_ranks(1, store.url, tmp_path / "second", [(compiled, "stopped", None)]) == [""]
    spec = tiny_spec(*compiled)
    assert trained(store, spec, "stopped") == trained(store, spec)
