"""A run whose machines come and go: killed at four ranks, two, three, ended with eight. Same bits."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from holdfast.store import Store
from holdfast.telemetry.event_log import PipeEvents
from tests.faults.killing import HELD_TRAINING, Output, followed, held_at, outcome
from tests.train.tiny_run import PIPE_FILE, new_store, start_training, tiny_spec, train_once

STEPS = 40
SIZES = [(4, 6), (2, 14), (3, 22)]  # ranks, in turn, and the step after which all of them are killed
LAST = 8  # ranks
AHEAD = 5  # steps that may be computed while the test is slow
GONE_SECONDS = 120


def asked(ranks: int, strategy: str) -> tuple[str, ...]:
    return (
        "training.determinism=elastic", "training.micro_batch=1", f"training.steps={STEPS}",
        f"parallel.processes={ranks}", f"parallel.strategy={strategy}", "checkpoint.every_steps=4",
    )  # fmt: skip


def train_and_kill(store: Store, home: Path, overrides: tuple[str, ...], step: int) -> None:
    """Start the training, and kill the launcher and all that it has started once `step` is reported."""
    spec = tiny_spec(*overrides)
    held = held_at(step + AHEAD, spec, store, home)
    process = start_training(spec, store.url, home, environment=held.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(home / PIPE_FILE))
    with followed(process, output) as reader:
        output.wait_for_step(step)
        assert output.step >= step, "".join(output.lines)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait(timeout=GONE_SECONDS) == -9, "".join(output.lines)
        _, left = psutil.wait_procs(started, timeout=GONE_SECONDS)  # they die with their parent
        assert not left
        reader.join()


@pytest.mark.drill
@pytest.mark.timeout(2400)  # more than all that waits in it
def test_four_ranks_then_two_then_three_then_eight_end_with_the_bits_of_one(tmp_path: Path) -> None:
    strategy = "fsdp"  # replicas that come and go: test_members.py
    calm, store = new_store(tmp_path / "calm"), new_store(tmp_path / "store")
    train_once(tiny_spec(*asked(1, strategy)), calm.url, tmp_path / "calm-home")
    for ranks, step in SIZES:
        train_and_kill(store, tmp_path / f"home-{step}", asked(ranks, strategy), step)
    train_once(tiny_spec(*asked(LAST, strategy)), store.url, tmp_path / "home-last")
    ended, expected = (outcome(each, tiny_spec(*asked(LAST, strategy)))[1] for each in (store, calm))
    for what in ("state", "history", "export"):  # the pieces are cut where ranks were
        assert ended[what] == expected[what]
