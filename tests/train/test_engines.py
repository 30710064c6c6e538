"""Every engine resumes to the same bits, takes over every other's state, and computes the same steps."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.components.checkpoint import Attempt, Checkpointer, Retention, TensorBox, read_manifest, read_tensor
from holdfast.components.spec import Spec, run_id
from holdfast.components.store import Store, open_store
from holdfast.components.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, join, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16")
BOTH = list(product(STRATEGIES, PRECISIONS))


def overrides(strategy: str, precision: str = "fp32", processes: int = 2) -> tuple[str, ...]:
    return (
        f"parallel.strategy={strategy}",
        f"training.precision={precision}",
        f"parallel.processes={processes}",
        "training.steps=8",
    )


def salt_of(strategy: str, kind: str = "undisturbed") -> str:
    """The salt of a layout's run: without it, all of them would be one run."""
    return f"{strategy} {kind}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store in which two ranks have trained every engine; made once, whichever of pytest's processes is first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engines"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _train_every_engine(folder)
            (folder / "done").touch()
    return open_store(f"file://{folder / 'store'}")


def _train_every_engine(folder: Path) -> None:
    """Undisturbed, and again stopped by SIGTERM and resumed by other processes."""
    store = new_store(folder / "store")
    first: Runs = []
    for strategy, precision in BOTH:
        asked = overrides(strategy, precision)
        first += [(asked, salt_of(strategy), None), (asked, salt_of(strategy, "stopped"), 4)]
    assert train_in_ranks(2, store.url, folder / "first", first) == ["", "PreemptedError"] * len(BOTH)
    stopped_at = read_manifest(store, run_id(tiny_spec(*overrides("ddp")), DATASET_ID, salt_of("ddp", "stopped")), 5)
    assert stopped_at.step == 5
    second: Runs = [(overrides(*each), salt_of(each[0], "stopped"), None) for each in BOTH]
    assert train_in_ranks(2, store.url, folder / "second", second) == [""] * len(BOTH)


def losses(store: Store, spec: Spec, salt: str = "") -> np.ndarray:
    """The loss of every step; of the undisturbed run of the spec's layout unless `salt` names another."""
    salt = salt or salt_of(spec.parallel.strategy)
    return np.array([row["loss"] for row in read_history(store, run_id(spec, DATASET_ID, salt))], np.float32)


def ulps(one: np.ndarray, other: np.ndarray) -> int:
    """The largest distance of two positive fp32 arrays, in steps between neighbouring numbers."""
    return int(np.abs(one.view(np.int32).astype(np.int64) - other.view(np.int32)).max())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision"), BOTH)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    store: Store, strategy: str, precision: str
) -> None:
    spec = tiny_spec(*overrides(strategy, precision))
    assert trained(store, spec, salt_of(strategy, "stopped")) == trained(store, spec, salt_of(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_engine_walks_down_the_same_loss_curve(store: Store, strategy: str) -> None:
    reference = losses(store, tiny_spec(*overrides("ddp")))
    assert ulps(losses(store, tiny_spec(*overrides(strategy))), reference) <= 64
    assert reference[-1] < reference[0]


@pytest.mark.slow
def test_any_engine_takes_over_the_state_of_any_other_bit_for_bit(store: Store, tmp_path: Path) -> None:
    assert in_ranks(2, _take_over, store.url, tmp_path, seconds=300) == [True, True]
    for source in STRATEGIES:
        saved = read_manifest(store, run_id(tiny_spec(*overrides(source)), DATASET_ID, salt_of(source)), 8)
        for target in STRATEGIES:
            taken = read_manifest(store, f"{source}-to-{target}", 8)
            assert taken.tensors.keys() == saved.tensors.keys()
            assert taken.state_digest == saved.state_digest, (source, target)
            for name in saved.tensors:
                assert torch.equal(read_tensor(store, taken, name), read_tensor(store, saved, name)), (source, target)


def _take_over(rank: int, size: int, url: str, folder: Path) -> bool:
    from holdfast.components.train.engine import build_engine
    from holdfast.components.train.randomness import make_deterministic

    join(folder, rank, size, deepspeed=True)
    make_deterministic("exact", 1)
    store = open_store(url)
    for target in STRATEGIES:
        engine = build_engine(tiny_assignment(*overrides(target)), VOCABULARY, 0)
        for source in STRATEGIES:
            identity = run_id(tiny_spec(*overrides(source)), DATASET_ID, salt_of(source))
            reader = Checkpointer(store, Attempt(identity, 1), Retention(1), describe={})
            start = reader.restore(engine.boxes(), _no_first_state)
            engine.restored(start)
            describe = {"dataset_id": DATASET_ID, "layout": engine.layout, "random": {}}
            writer = Checkpointer(store, Attempt(f"{source}-to-{target}", 1), Retention(1), describe=describe)
            writer.save(start, engine.saved(), {"optimizer.step": start})
            writer.wait()
    return True


def _no_first_state(boxes: object) -> None:
    raise AssertionError("there is a checkpoint to load")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_a_state_goes_from_engine_to_engine_bit_for_bit_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    for digests in in_ranks(size, _hand_on, f"file://{tmp_path / 'store'}", tmp_path, seconds=300):
        assert len(digests) >= len(STRATEGIES)
        assert len(set(digests)) == 1


def _hand_on(rank: int, size: int, url: str, folder: Path) -> list[str]:
    """Save a random state with one engine, and what each further engine has loaded of it; the digests."""
    from holdfast.components.train.engine import build_engine
    from holdfast.components.train.randomness import make_deterministic

    join(folder, rank, size, deepspeed=True)
    make_deterministic("exact", 1)
    store, identity = open_store(url), "handed-on"
    for number, strategy in enumerate((*STRATEGIES, "ddp"), start=1):
        asked = (*overrides(strategy, processes=size), "training.global_batch=6")
        engine = build_engine(tiny_assignment(*asked), VOCABULARY, 0)
        describe = {"dataset_id": DATASET_ID, "layout": engine.layout, "random": {}}
        checkpointer = Checkpointer(store, Attempt(identity, number), Retention(9), describe=describe)
        first_state = _random_state if number == 1 else _no_first_state
        engine.restored(checkpointer.restore(engine.boxes(), first_state))
        checkpointer.save(number, engine.saved(), {"optimizer.step": 0})
        checkpointer.wait()
    return [read_manifest(store, identity, number).state_digest for number in range(1, number + 1)]


def _random_state(boxes: Sequence[TensorBox]) -> None:
    torch.manual_seed(3)
    for box in boxes:
        box.data.normal_()


@pytest.mark.slow
def test_one_process_computes_what_two_compute_and_small_batches_what_large_ones_do(
    store: Store, tmp_path: Path
) -> None:
    alone, zero = overrides("ddp", processes=1), overrides("zero1", processes=1)
    whole = (*alone, "training.micro_batch=8")
    masked = (*alone, "data.document_masks=true")
    shown = (*alone, "training.log_every=3", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
    named = {"alone": alone, "whole": whole, "masked": masked, "zero": zero, "shown": shown}
    runs: Runs = [(asked, name, None) for name, asked in named.items()]
    assert train_in_ranks(1, store.url, tmp_path, runs) == [""] * 5
    curves = {name: losses(store, tiny_spec(*asked), name) for name, asked in named.items()}
    one = curves["alone"]
    assert ulps(one, losses(store, tiny_spec(*overrides("ddp")))) <= 64
    assert ulps(curves["whole"], one) <= 64
    assert ulps(curves["zero"], one) <= 64
    assert curves["zero"][0] == one[0]  # the first step differs in nothing but who computes it
    assert not np.array_equal(curves["masked"], one)
    assert trained(store, tiny_spec(*shown), "shown") == trained(store, tiny_spec(*alone), "alone")
