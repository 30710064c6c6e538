"""Batches by step: every sample once per epoch, exact shares of a mixture, and no other inputs."""

from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from holdfast.dataset import Batches, Dataset, Prefetcher
from holdfast.dataset.batches import LOOKAHEAD
from holdfast.dataset.dataset import WindowShuffle
from holdfast.dataset.mixture import UniformOrder, WeightedOrder, block_quotas
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.dataset.conftest import DATASET_ID, Write

CONTEXT = 16


def counted(samples: int, start: int = 0) -> np.ndarray:
    """Tokens that encode their position."""
    return np.arange(start, start + samples * CONTEXT + 1)


def opened(store: Store, tmp_path: Path) -> Dataset:
    return Dataset.open(store, DATASET_ID, tmp_path / "cache")


def sample_numbers(batches: Batches, places: int) -> list[int]:
    rows = np.concatenate([batches.batch(step) for step in range(-(-places // batches.sizes.final))])[:places]
    assert (np.diff(rows, axis=1) == 1).all()
    return [int(row[0]) // CONTEXT for row in rows]


@pytest.mark.parametrize("shard_tokens", [CONTEXT - 3, 100, 10**6])
def test_every_sample_occurs_once_per_epoch_and_epochs_differ(
    store: Store, write: Write, tmp_path: Path, shard_tokens: int
) -> None:
    write([counted(101)], shard_tokens=shard_tokens)
    batches = opened(store, tmp_path).training(CONTEXT, 7, seed=3)
    numbers = sample_numbers(batches, 303)
    epochs = [numbers[start : start + 101] for start in (0, 101, 202)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(101))


def test_a_batch_depends_on_the_step_alone_and_rows_are_read_by_themselves(
    store: Store, write: Write, tmp_path: Path
) -> None:
    write([counted(50), counted(30, 20_000)], shard_tokens=90)
    forward = opened(store, tmp_path).training(CONTEXT, 6, seed=1)
    whole = [forward.batch(step) for step in range(40)]
    for step in (39, 0, 17):
        fresh = opened(store, tmp_path).training(CONTEXT, 6, seed=1)
        np.testing.assert_array_equal(fresh.batch(step), whole[step])
        for ranks in (1, 2, 3, 6):
            parts = [fresh.batch(step, slice(rank, None, ranks)) for rank in range(ranks)]
            np.testing.assert_array_equal(np.concatenate(parts)[np.argsort(_interleaved(6, ranks))], whole[step])
    np.testing.assert_array_equal(forward.batch(5, slice(None, None, -1)), whole[5][::-1])
    assert forward.batch(3, slice(6, 6)).shape == (0, CONTEXT + 1)
    far = opened(store, tmp_path).training(CONTEXT, 6, seed=1).batch(10**12)
    assert far.shape == (6, CONTEXT + 1)


def _interleaved(rows: int, ranks: int) -> np.ndarray:
    return np.concatenate([np.arange(rows)[rank::ranks] for rank in range(ranks)])


def test_the_order_is_the_same_on_every_machine_and_version(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(1000)], shard_tokens=5000)
    assert sample_numbers(opened(store, tmp_path).training(CONTEXT, 4, seed=0), 8) == ORDER_OF_SEED_0
    assert sample_numbers(opened(store, tmp_path).training(CONTEXT, 4, seed=1), 8) != ORDER_OF_SEED_0


ORDER_OF_SEED_0 = [157, 564, 823, 834, 38, 35, 551, 848]


def test_steps_a_lookahead_apart_are_different_batches(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(6000)], shard_tokens=10**6)
    batches = opened(store, tmp_path).training(CONTEXT, 8, seed=0)
    apart = LOOKAHEAD // 8
    far = opened(store, tmp_path).training(CONTEXT, 8, seed=0).batch(apart)
    near = batches.batch(0)  # resolves the positions of the first window
    assert not np.array_equal(batches.batch(apart), near)
    np.testing.assert_array_equal(batches.batch(apart), far)


def test_without_weights_all_sources_are_one_epoch(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(40), counted(10, 20_000)])
    batches = opened(store, tmp_path).training(CONTEXT, 5, seed=0, weights=[None, None])
    firsts = [int(row[0]) for step in range(10) for row in batches.batch(step)]
    assert len(set(firsts)) == 50 == batches.samples
    assert sum(first >= 20_000 for first in firsts) == 10


def test_weights_give_exact_shares_and_each_source_its_own_epochs(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(300), counted(50, 20_000)])
    batches = opened(store, tmp_path).training(CONTEXT, 64, seed=0, weights=[1, 3])
    block = sum(block_quotas([1, 3]))
    firsts = [int(row[0]) for step in range(block // 64) for row in batches.batch(step)]
    assert sum(first >= 20_000 for first in firsts) * 4 == block * 3
    second = [first for first in firsts if first >= 20_000]
    for start in range(0, len(second) - 50, 50):
        assert len(set(second[start : start + 50])) == 50
    often = Counter(first for first in firsts if first < 20_000)
    assert max(often.values()) - min(often.values()) <= 1


def test_quotas_are_exact_where_a_block_can_hold_them_and_never_forget_a_source() -> None:
    for weights in ([1, 3], [0.7, 0.2, 0.1], [5, 5, 5]):
        quotas = block_quotas(weights)
        exact = [Fraction(str(weight)) for weight in weights]
        assert [Fraction(quota, sum(quotas)) for quota in quotas] == [weight / sum(exact) for weight in exact]
    quotas = block_quotas([1.0, 1e-9, 0.123456789])
    assert min(quotas) == 1
    assert abs(quotas[0] / sum(quotas) - 1 / 1.123456790) < 1 / 8192


def test_a_source_shorter_than_one_sample_is_reported_with_the_remedy(
    store: Store, write: Write, tmp_path: Path
) -> None:
    write([counted(40), np.arange(CONTEXT)])
    with pytest.raises(DataError, match=r"source-1.*16 training tokens.*lower model.context"):
        opened(store, tmp_path).training(CONTEXT, 4, seed=0)


def test_a_source_larger_than_its_block_quota_continues_in_the_next_block() -> None:
    order = WeightedOrder([5000, 5000], [1, 1], seed=0)
    source, sample = order(np.arange(2 * order.block))
    assert order.quotas == (2048, 2048)
    for index in (0, 1):
        assert len(set(sample[source == index].tolist())) == 2 * 2048  # no sample repeats within an epoch


def test_every_block_of_a_mixture_has_a_different_order_in_each_row_and_seed() -> None:
    def blocks(seed: int, rows: int = 1) -> set[bytes]:
        order = WeightedOrder([9000, 9000, 9000], [1, 1, 2], seed, rows=rows)
        sources = order(np.arange(4 * order.block * rows))[0].reshape(4, order.block, rows)
        assert all(
            (np.bincount(block) == order.quotas).all() for block in sources.transpose(0, 2, 1).reshape(-1, order.block)
        )
        return {block.tobytes() for block in sources.transpose(0, 2, 1).reshape(-1, order.block)}

    assert len(blocks(0) | blocks(1)) == 8
    assert len(blocks(0, rows=3)) == 12


def test_the_order_of_a_mixture_is_the_same_on_every_machine_and_version() -> None:
    """A change of this number changes the batches of existing runs."""

    def digest(order: UniformOrder | WeightedOrder) -> str:
        orders = (order(places) for places in (np.arange(9000), np.array([10**12, 10**15 + 1])))
        return blake3(b"".join(part.astype("<i8").tobytes() for parts in orders for part in parts)).hexdigest()[:16]

    assert [
        digest(UniformOrder([700, 30], 1)),
        digest(WeightedOrder([700, 30], [3, 1], 1)),
        digest(WeightedOrder([700, 30, 5], [0.3, 0.5, 0.123456789], 1, rows=4)),
        digest(UniformOrder([1003], 1, partial(WindowShuffle, rows=4, block=10, window=3))),
    ] == ["3c9ff38f7da2976e", "fea1402c58965e09", "e716e49b8c6c23ea", "1d06f69aaa1bc2be"]


def test_weights_must_be_given_for_every_source(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(40), counted(40)])
    with pytest.raises(DataError, match="1 weights for 2 sources"):
        opened(store, tmp_path).training(CONTEXT, 4, seed=0, weights=[1.0, None])


def test_wide_vocabularies_take_four_bytes_a_token(store: Store, write: Write, tmp_path: Path) -> None:
    manifest = write([counted(40, 100_000)], vocabulary=200_000)
    assert manifest.sources[0].splits["train"].shards[0].dtype == "uint32"
    assert opened(store, tmp_path).training(CONTEXT, 4, seed=0).batch(0).min() >= 100_000


def test_prefetching_gives_the_same_batches_from_any_step(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(40)])
    batches = opened(store, tmp_path).training(CONTEXT, 4, seed=0)
    with Prefetcher(batches, slice(1, 3), start=5, depth=3, stop=9) as ahead:
        prefetched = list(ahead)
    assert [step for step, _ in prefetched] == [5, 6, 7, 8]
    for step, rows in prefetched:
        np.testing.assert_array_equal(rows, batches.batch(step)[1:3])


def test_prefetching_stops_early_and_hands_on_errors(store: Store, write: Write, tmp_path: Path) -> None:
    write([counted(40)])
    batches = opened(store, tmp_path).training(CONTEXT, 4, seed=0)
    with Prefetcher(batches, start=0) as ahead:
        assert next(iter(ahead))[0] == 0
    with Prefetcher(batches, start=-1) as ahead, pytest.raises(ValueError, match="steps count from 0"):
        next(iter(ahead))
