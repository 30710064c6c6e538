"""Coverage: a save commits only if its parts make up every tensor exactly once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Attempt, StateDigest, TensorBox, digest_of
from holdfast.checkpoint import catalogue as coverage_module
from holdfast.checkpoint.catalogue import TensorInfo, coverage_of, whole_coverage
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.checkpoint.saving import DESCRIBE, RUN


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=4))
def test_the_coverage_of_a_box_is_the_state_digest_of_zeros_there(sizes: list[tuple[int, int]]) -> None:
    shape, offset = tuple(size for size, _ in sizes), tuple(low for _, low in sizes)
    whole = tuple(size + low + 1 for size, low in sizes)
    zeros = TensorBox("t", whole, offset, torch.zeros(shape, dtype=torch.uint8))
    assert coverage_of("t", TensorInfo(whole, "uint8"), offset, shape) == digest_of([zeros])


def test_a_long_dimension_is_summed_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    info, box = TensorInfo((5000,), "uint8"), ((17,), (4321,))
    expected = coverage_of("t", info, *box)
    monkeypatch.setattr(coverage_module, "_TABLE", 100)
    monkeypatch.setattr(coverage_module, "_CHUNK", 1000)
    coverage_module._range_sums.cache_clear()
    assert coverage_of("t", info, *box) == expected
    coverage_module._range_sums.cache_clear()
    coverage_module._prefix_sums.cache_clear()


def test_any_tiling_adds_up_to_the_whole_and_nothing_else_does() -> None:
    info = TensorInfo((6, 8), "float32")
    tiles = [((0, 0), (2, 8)), ((2, 0), (4, 3)), ((2, 3), (4, 5))]
    whole = whole_coverage({"t": info})
    parts = [coverage_of("t", info, *tile) for tile in tiles]
    assert sum(parts, StateDigest()) == whole
    for changed in (
        [*tiles[:2], ((2, 2), (4, 5))],  # overlaps one column and misses another
        [*tiles[:2], tiles[0]],
        [((0, 0), (2, 8)), ((2, 0), (4, 8)), ((0, 0), (0, 8))],
    ):
        total = sum((coverage_of("t", info, *tile) for tile in changed), StateDigest())
        assert (total == whole) is (changed[-1][1][0] == 0)


@pytest.mark.parametrize(
    ("rows", "complete"),
    [
        (((0, 2), (2, 4)), True),
        (((0, 2), (1, 3)), False),
        (((0, 2), (0, 2)), False),
        (((0, 2), (2, 3)), False),
        (((0, 3), (2, 4)), False),
    ],
)
def test_writers_whose_parts_overlap_or_leave_a_hole_commit_nothing(
    folder_store: Store, rows: tuple[tuple[int, int], ...], complete: bool
) -> None:
    attempt, data = Attempt(RUN, 1), torch.arange(16.0).view(4, 4)
    for writer, (low, high) in enumerate(rows):
        ShardWriter(folder_store, attempt, writer).write(3, [TensorBox("t", (4, 4), (low, 0), data[low:high])])
    committer = Committer(folder_store, attempt, len(rows))
    if complete:
        committer.commit(3, DESCRIBE, {})
    else:
        with pytest.raises(DataError, match="do not make up every tensor exactly once"):
            committer.commit(3, DESCRIBE, {})
    assert checkpoint_steps(folder_store, RUN) == ([3] if complete else [])
