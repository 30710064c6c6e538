"""The shuffle of blocks: every sample once per epoch, the same batches at any world size, and one share per node."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.dataset import Batches, Dataset
from holdfast.dataset.dataset import WindowShuffle
from holdfast.dataset.remote import PIECE_BYTES
from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.spec.data import Shuffle
from holdfast.store import Store
from tests.dataset.conftest import DATASET_ID, Meter, Write

CONTEXT = 16


@settings(max_examples=40)
@given(
    count=st.integers(1, 500), rows=st.integers(1, 20), block=st.integers(1, 60), window=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_every_sample_occurs_once_per_epoch(count: int, rows: int, block: int, window: int, seed: int) -> None:
    shuffle = WindowShuffle(count, seed, "samples", rows=rows, block=block, window=window)
    epochs = shuffle(np.arange(3 * count)).reshape(3, count)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (3, 1)))
    places = np.random.default_rng(seed).integers(0, 3 * count, 20)
    np.testing.assert_array_equal(shuffle(places), epochs.ravel()[places])


def test_epochs_and_seeds_differ_and_the_order_is_the_same_on_every_machine() -> None:
    def order(seed: int, epoch: int = 0) -> list[int]:
        shuffle = WindowShuffle(1000, seed, "samples", rows=4, block=10, window=3)
        return shuffle(np.arange(epoch * 1000, epoch * 1000 + 8)).tolist()

    assert order(0) == ORDER_OF_SEED_0
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


ORDER_OF_SEED_0 = [820, 697, 514, 41, 989, 536, 323, 390]


def test_far_places_of_a_huge_corpus_need_no_memory() -> None:
    shuffle = WindowShuffle(10**14 + 7, 1, "samples", rows=1024, block=512, window=4)
    places = np.arange(5 * 10**17, 5 * 10**17 + 4096)
    assert len(np.unique(shuffle(places))) == 4096


def test_a_row_reads_one_window_of_blocks_at_a_time_and_a_batch_reads_as_many_places_as_it_has_rows() -> None:
    rows, block, window, row_blocks = 8, 10, 3, 6
    shuffle = WindowShuffle(rows * block * row_blocks, 0, "samples", rows=rows, block=block, window=window)
    samples = shuffle(np.arange(rows * block * row_blocks)).reshape(-1, rows)  # [step, row]
    blocks = samples // block
    assert all(len(set(step)) == rows for step in blocks.tolist())
    read = [Counter(blocks[:, row].tolist()) for row in range(rows)]
    assert all(set(counts.values()) == {block} and len(counts) == row_blocks for counts in read)
    assert len(set().union(*read)) == rows * row_blocks  # no two rows read the same block
    for first in range(0, block * row_blocks, block * window):
        for row in range(rows):
            assert len(set(blocks[first : first + block * window, row].tolist())) == window
    inside = samples[: block * window, 0]
    assert (np.diff(inside) != 1).mean() > 0.8  # mixed
    assert not (samples % block == (samples % block)[:, :1]).all(axis=1).any()  # rows do not run in lockstep


def blocks_of(context: int = CONTEXT, samples: int = 8, window: int = 2) -> Shuffle:
    return Shuffle(kind="blocks", block_tokens=max(1024, context * samples), window=window)


def test_batches_are_the_same_at_any_world_size_and_from_any_step(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(70_000) % 50_000, np.arange(20_000)], shard_tokens=7000)

    def training(weights: list[int] | None = None) -> Batches:
        return Dataset.open(store, DATASET_ID, tmp_path).training(CONTEXT, 8, 3, weights, blocks_of())

    for weights in (None, [1, 2]):
        whole = [training(weights).batch(step) for step in range(30)]
        fresh = training(weights)
        for step in (29, 0, 7):
            for ranks in (1, 2, 4, 8):
                share = 8 // ranks
                parts = [fresh.batch(step, slice(rank * share, rank * share + share)) for rank in range(ranks)]
                np.testing.assert_array_equal(np.concatenate(parts), whole[step])


def test_weights_keep_exact_shares_and_every_source_its_epochs(store: Store, write: Write, tmp_path: Path) -> None:
    write([np.arange(300 * CONTEXT + 1), 20_000 + np.arange(100 * CONTEXT + 1)], shard_tokens=5000)
    shuffle = Shuffle(kind="blocks", block_tokens=1024, window=1)
    batches = Dataset.open(store, DATASET_ID, tmp_path).training(CONTEXT, 4, 0, [1, 3], shuffle)
    firsts = np.concatenate([batches.batch(step)[:, 0] for step in range(4096)])  # positions of four mixed blocks
    assert (firsts >= 20_000).sum() * 4 == len(firsts) * 3
    for low, high in ((0, 20_000), (20_000, 50_000)):
        often = Counter(firsts[(firsts >= low) & (firsts < high)].tolist())
        assert max(often.values()) - min(often.values()) <= 1
    assert len({tuple(row >= 20_000 for row in step) for step in firsts.reshape(-1, 4).tolist()}) > 4


@pytest.mark.slow
def test_one_of_two_nodes_reads_its_part_of_an_epoch(
    bucket: Store, proxy: FaultyProxy, write: Write, tmp_path: Path
) -> None:
    """For pieces that processes of a node fetch once, see test_remote.py."""
    tokens = 33 * 8 * PIECE_BYTES // 2
    write([np.arange(tokens) % 50_000], shard_tokens=tokens // 5, to=bucket)
    shuffle, meter = Shuffle(kind="blocks", block_tokens=8 * PIECE_BYTES // 2, window=2), Meter(proxy)
    batches = Dataset.open(bucket, DATASET_ID, tmp_path).training(4096, 8, 0, None, shuffle)
    for step in range(tokens // 4096 // 8):
        batches.batch(step, slice(4, 8))
    assert 0.5 < meter.bytes / (tokens * 2) < 0.67
