"""`holdfast shell` in the place of a rank of a real training that is held at a step."""

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.pipelines.backends.record import process_start, record_of
from holdfast.pipelines.backends.request import RunRequest
from holdfast.telemetry.rank_logs import rank_streams
from tests import warm
from tests.faults.killing import HELD_TRAINING, Output, PipeEvents, followed, held_at
from tests.train.ranks import identity_of
from tests.train.tiny_run import PIPE_FILE, new_store, start_training, tiny_spec

SECRET = "a-key-of-the-tracker"


@pytest.mark.slow
def test_a_command_sees_the_environment_of_its_rank_and_its_exit_code_passes_through(tmp_path: Path) -> None:
    spec = tiny_spec("parallel.processes=2", "cluster.environment={OF_THE_SPEC: yes-please}")
    store, identity, home = new_store(tmp_path / "store"), identity_of(spec), tmp_path / "home"
    gate = held_at(2, spec, store, home)
    variables = {**gate.variables, "WANDB_API_KEY": SECRET}
    process = start_training(spec, store.url, home, environment=variables, module=HELD_TRAINING)
    record = replace(
        record_of(RunRequest(spec, store.url, run_id=identity), "local", identity), host=socket.gethostname(),
        pid=process.pid, began=process_start(process.pid) or 0.0, outcomes=str(tmp_path),
    )  # fmt: skip
    record.write(store)  # as `holdfast run` does
    print_all = "import json, os, sys; print(json.dumps(dict(os.environ))); sys.exit(37)"
    with followed(process, Output(PipeEvents(home / PIPE_FILE))):
        gate.wait(lambda: bool(rank_streams(store, identity, 1)), "the record of rank 1")
        shell = ["shell", identity[:6], "--rank", "1", "--store", store.url, "--", sys.executable, "-c", print_all]
        command = [sys.executable, "-m", "holdfast.pipelines.cli", *shell]
        result = warm.run(command, {**os.environ, "HOLDFAST_HOME": str(home), "OF_THE_TERMINAL": "1"}, tmp_path)
        (rank,) = rank_streams(store, identity, 1)
        assert process.poll() is None
    assert result.returncode == 37, result.stderr
    seen = json.loads(result.stdout)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OF_THE_SPEC": "yes-please", "PWD": str(Path.cwd())}
    assert {name: seen.get(name) for name in expected} == expected
    assert not {"OF_THE_TERMINAL", "WANDB_API_KEY", "HOLDFAST_PARENT", "HOLDFAST_NEAR_KEY"} & seen.keys()
    assert SECRET not in result.stdout
    assert (rank.node, rank.ended) == (socket.gethostname(), None)
