"""A growing batch: a function of the step, each sample once, and the same bits after a restart or on more ranks."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast.dataset import Dataset
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.telemetry import read_history
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

RAMP = ("training.batch_ramp={start: 4, increment: 2, steps: 7}", "training.micro_batch=1")
ELASTIC = (*RAMP, "training.determinism=elastic")


def test_sizes_grow_by_equal_increments_and_no_place_is_lost_between_them() -> None:
    for sizes in (BatchSizes(8), BatchSizes(8, 4, 2, 7), BatchSizes(96, 32, 1, 64), BatchSizes(9, 3, 6, 5)):
        batch_sizes = [sizes.size(step) for step in range(100)]
        assert [sizes.before(step) for step in range(101)] == np.cumsum([0, *batch_sizes]).tolist()
        assert batch_sizes[0] == (sizes.start or sizes.final)
        assert set(batch_sizes[sizes.steps :]) == {sizes.final}
        assert {after - before for before, after in pairwise(batch_sizes)} <= {0, sizes.increment}
    assert [BatchSizes(8, 4, 2, 7).size(step) for step in range(9)] == [4, 4, 4, 4, 6, 6, 6, 8, 8]


def test_a_growing_batch_reads_every_sample_of_an_epoch_once(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    dataset = Dataset.open(store, DATASET_ID, tmp_path)
    grown = dataset.training(16, BatchSizes(8, 4, 2, 7), 0)
    steps = next(step for step in range(1000) if grown.sizes.before(step) >= grown.samples)
    rows = np.concatenate([grown.batch(step) for step in range(steps)])
    whole = dataset.training(16, grown.samples, 0)
    assert np.array_equal(rows[: grown.samples], whole.batch(0))
    assert np.array_equal(grown.batch(5, lambda size: slice(size // 2, size)), grown.batch(5)[3:])


@pytest.mark.slow
def test_a_run_whose_batch_grows_has_the_same_bits_after_an_end(tmp_path: Path) -> None:
    store, two = new_store(tmp_path / "store"), (*RAMP, "parallel.processes=2")
    runs: Runs = [(two, "whole", None), (two, "left", 5), (two, "left", None)]
    assert train_in_ranks(2, store.url, tmp_path / "2", runs) == ["", "PreemptedError", ""]
    assert trained(store, tiny_spec(*two), "left") == trained(store, tiny_spec(*two), "whole")
    rows = read_history(store, identity_of(tiny_spec(*two), "whole"))
    assert np.diff([0, *(row["tokens"] for row in rows)]).tolist() == [
        16 * size for size in [4] * 4 + [6] * 3 + [8] * 5
    ]


@pytest.mark.drill
def test_a_batch_that_grows_has_the_same_bits_under_elastic_on_more_ranks(tmp_path: Path) -> None:
    store, fsdp = new_store(tmp_path / "store"), (*ELASTIC, "parallel.strategy=fsdp")
    runs: Runs = [(fsdp, "two", 4), ((*ELASTIC, "parallel.processes=2"), "ddp", None)]
    assert train_in_ranks(2, store.url, tmp_path / "2", runs) == ["PreemptedError", ""]
    alone: Runs = [(fsdp, "two", None), (fsdp, "one", None), (ELASTIC, "ddp alone", None)]
    assert train_in_ranks(1, store.url, tmp_path / "1", alone) == [""] * 3
    assert trained(store, tiny_spec(*fsdp), "two") == trained(store, tiny_spec(*fsdp), "one")
    assert trained(store, tiny_spec(*ELASTIC), "ddp") == trained(store, tiny_spec(*ELASTIC), "ddp alone")
