"""The keyed function is a permutation at any size, and it shuffles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.dataset.permutation import Permutation, derive_key


@given(n=st.integers(1, 5000), key=st.integers(0, 2**63))
@settings(max_examples=200)
def test_every_index_is_hit_once(n: int, key: int) -> None:
    image = Permutation(n, derive_key(key))(np.arange(n))
    np.testing.assert_array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize("n", [2**62 - 1, 10**15 + 37, 2**32, 2**32 + 1])
def test_huge_ranges_need_no_memory_and_stay_inside(n: int) -> None:
    image = Permutation(n, derive_key(1))(np.arange(n - 10_000, n))
    assert len(np.unique(image)) == 10_000
    assert image.min() >= 0
    assert image.max() < n


def test_indices_may_have_any_shape_and_order() -> None:
    permutation = Permutation(977, derive_key("a", 1))
    whole = permutation(np.arange(977))
    np.testing.assert_array_equal(permutation(np.array([[5, 900], [3, 5]])), whole[[[5, 900], [3, 5]]])


@pytest.mark.slow
def test_over_many_keys_every_pair_of_places_is_equally_likely() -> None:
    n, keys = 20, 20_000
    counts = np.zeros((n, n))
    for key in range(keys):
        first, second = Permutation(n, derive_key(key))(np.arange(2))
        counts[first, second] += 1
    pairs = counts[~np.eye(n, dtype=bool)]
    expected = keys / len(pairs)
    chi_square = float(((pairs - expected) ** 2 / expected).sum())
    assert chi_square < len(pairs) - 1 + 5 * np.sqrt(2 * (len(pairs) - 1))  # five standard deviations


def test_keys_of_different_purposes_differ() -> None:
    keys = [
        derive_key(0, "samples", 0),
        derive_key(0, "samples", 1),
        derive_key(0, "block", 0),
        derive_key("0", "samples", 0),
    ]
    assert len(set(keys)) == len(keys)


def test_a_size_out_of_range_is_refused() -> None:
    for n in (0, -1, 2**62):
        with pytest.raises(ValueError, match="must be in 1"):
            Permutation(n, derive_key(0))
