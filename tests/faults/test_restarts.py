"""After a restart of the gang, the old rank 0 deletes nothing of the new gang during its collection; and other
restarts.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.checkpoint import list_attempts, open_checkpoint
from holdfast.checkpoint.attempts import read_attempt
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.launch.exits import FOLDER_VARIABLE
from holdfast.spec import ExitCode, Spec, run_id
from holdfast.store import Store, layout
from tests import warm
from tests.train.ranks import launch, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec

OVERRIDES = ("checkpoint.keep_last=1",)


def start(store: Store, spec: Spec, number: int, home: Path, how: str = "", **more: str) -> subprocess.Popen[str]:
    """Start the command of a rank. `how` selects a fault of `odd_worker`."""
    program = ["tests.faults.odd_worker", how] if how else ["holdfast.rank.worker"]
    command = [sys.executable, "-m", *program, "--run-id", run_id(spec, DATASET_ID), "--launch", str(number)]
    environment = {**os.environ, "HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    return warm.popen([*command, "--store", store.url], stderr=subprocess.PIPE, text=True, env={**environment, **more})


def test_an_old_rank_0_inside_a_collection_deletes_nothing_that_the_new_gang_committed(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*OVERRIDES)
    identity, first = run_id(spec, DATASET_ID), launch(store, spec)
    variables = {FOLDER_VARIABLE: str(tmp_path)}
    with start(store, spec, first, tmp_path / "home", f"pauses-in-{tmp_path}", **variables) as old:
        while not (tmp_path / "paused").exists():
            assert old.poll() is None
            time.sleep(0.02)
        number = launch(store, spec)
        new = start(store, spec, number, tmp_path / "home", **variables)
        _, log = new.communicate(timeout=300)
        assert new.returncode == ExitCode.OK, log
        (tmp_path / "go").touch()
        _, log = old.communicate(timeout=300)
    assert old.returncode == ExitCode.FENCED, log
    assert [number for number, _ in list_attempts(store, identity)] == [1, 2]
    assert [read_attempt(store, identity, attempt)["launch"] for attempt in (1, 2)] == [first, number]
    checkpoint = open_checkpoint(store, identity, spec.training.steps)
    assert all(checkpoint.tensor(name) is not None for name in checkpoint.tensors)
    reference = (OVERRIDES, "undisturbed", None)
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [reference]) == [""]
    assert trained(store, spec) == trained(store, spec, "undisturbed")


def test_a_rank_that_receives_sigterm_during_a_load_computes_no_step(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [((), "", 5)]) == ["PreemptedError"]
    steps = checkpoint_steps(store, run_id(spec, DATASET_ID))
    with start(store, spec, launch(store, spec), tmp_path / "home", "leaves-at-load") as process:
        _, log = process.communicate(timeout=300)
    assert process.returncode == ExitCode.TERMINATED, log
    assert f"stop requested with the state of step {steps[-1]} loaded" in log
    assert checkpoint_steps(store, run_id(spec, DATASET_ID)) == steps


@pytest.mark.slow
def test_a_local_run_recovers_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec()
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [((), "undisturbed", None)]) == [""]
    launch_number = launch(store, spec)
    with start(store, spec, launch_number, tmp_path / "home", "leaves-at-6", OPENBLAS_NUM_THREADS="1") as rank:
        _, log = rank.communicate(timeout=300)
    assert rank.returncode == ExitCode.PREEMPTED, log
    identity = run_id(spec, DATASET_ID)
    newest = checkpoint_steps(store, identity)[-1]
    older = checkpoint_steps(store, identity)[-2]
    (name, *_) = open_checkpoint(store, identity, newest).packs() - open_checkpoint(store, identity, older).packs()
    key = layout.pack(identity, str(name))
    store.put(key, bytes(len(store.get(key))))
    process = start_training(spec, store.url, tmp_path / "home")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == ExitCode.OK, output
    assert trained(store, spec) == trained(store, spec, "undisturbed")
    # The second attempt reported damage, the third confirmed it.
    assert [number for number, _ in list_attempts(store, identity)] == [1, 2, 3]
