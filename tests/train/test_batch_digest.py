"""The digest of a step's samples depends on the tokens only, not on their division among ranks."""

from pathlib import Path

import numpy as np

from holdfast.collectives import Gang
from holdfast.rank.observers import BatchDigest, samples_digest
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import join


def test_the_digest_knows_every_token_and_no_order_of_samples() -> None:
    rows = np.random.default_rng(1).integers(0, 300, (8, 17))
    digest = samples_digest(rows)
    assert samples_digest(rows[::-1]) == digest
    assert (samples_digest(rows[:3]) + samples_digest(rows[3:])) % 2**64 == digest
    for place in np.ndindex(rows.shape):
        changed = rows.copy()
        changed[place] += 1
        assert samples_digest(changed) != digest, place
    assert samples_digest(np.concatenate([rows, rows[:1]])) != digest  # one sample twice


def _digests_of(rank: int, size: int, folder: Path) -> list[dict[int, str]]:
    join(folder, rank, size, always=True)
    digest, rows = BatchDigest(Gang(), speaks=rank != 2), np.arange(8 * 5).reshape(8, 5)
    own_rows = rows[4 * (rank % 2) :][:4]  # rank 2 gets the rows of rank 0
    ahead = digest.record((step, own_rows + step) for step in range(6, 9))
    next(ahead), next(ahead)
    first = digest.flush()
    next(ahead)
    return [first, digest.flush()]


def test_the_batch_digest_of_all_ranks_is_recorded_once_per_step(tmp_path: Path) -> None:
    rows = np.arange(8 * 5).reshape(8, 5)
    expected = {step + 1: f"{samples_digest(rows + step):016x}" for step in range(6, 9)}
    first, then = {step: expected[step] for step in (7, 8)}, {9: expected[9]}
    assert in_ranks(3, _digests_of, tmp_path, seconds=200) == [[first, then]] * 3
