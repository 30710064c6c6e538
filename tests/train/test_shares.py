"""Micro-batches dealt by measured speed: a slow rank computes fewer, and the bits are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engines.grid import Grid, Node, PartialSums, root
from holdfast.store import open_store
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import identity_of, join, launch, trained
from tests.train.test_elastic import by_definition, values
from tests.train.tiny_run import new_store, tiny_spec

SECONDS = (0.25, 1.0)  # that the probe of each rank takes
RUN = ("training.determinism=elastic", "parallel.processes=2", "training.steps=4", "training.micro_batch=1")
DEALT = [Grid(grains, len(speeds), speeds) for grains in (3, 8, 13)
         for speeds in ((1.0, 0.25), (0.25, 1.0), (1.0, 0.001, 1.0), (1.0, 1.0, 0.3))]  # fmt: skip


def test_grains_are_dealt_once_by_speed_and_the_tree_stays_the_same() -> None:
    for grid in DEALT:
        shares = [grid.share(rank) for rank in range(grid.ranks)]
        assert [grain for share in shares for grain in share] == list(range(grid.grains))
        assert min(map(len, shares)) >= 1
        leaves, sums = values(grid.grains), dict[Node, torch.Tensor]()
        for rank, share in enumerate(shares):
            partial = PartialSums(share.start)
            for grain in share:
                partial.add([leaves[grain].clone()])
            sums |= dict(zip(grid.nodes(rank), (node[0] for node in partial.sums), strict=True))
        assert torch.equal(root(grid, sums), by_definition(leaves)), grid
    assert [len(Grid(8, 2, (1.0, 0.25)).share(rank)) for rank in range(2)] == [6, 2]
    assert [Grid(8, 3, (1.0, 1.0, 1.0)).share(rank) for rank in range(3)] == [range(3), range(3, 5), range(5, 8)]


def _train(rank: int, size: int, url: str, folder: Path) -> list[int]:
    """Train with both deals, while rank 1 is slow. Returns the micro-batches of this rank for each."""
    import holdfast.rank.shares as shares
    from holdfast.collectives import Gang
    from holdfast.engines.torch.micro import Micro
    from holdfast.rank.preemption import PreemptionSignal
    from holdfast.rank.worker import work

    join(folder, rank, size, always=True)
    compute, counts = Micro.compute, list[int]()

    def counted(micro: Micro, *arguments: Any) -> Any:
        counts[-1] += 1
        return compute(micro, *arguments)

    shares._multiply, Micro.compute = lambda *_: SECONDS[rank], counted  # type: ignore[method-assign,assignment]
    gang, store = Gang(), open_store(url)
    for deal in ("equal", "measured"):
        spec = tiny_spec(*RUN, f"parallel.deal={deal}")
        number = gang.broadcast(launch(store, spec, deal) if rank == 0 else None, int | None)
        assert number is not None
        counts.append(0)
        work(store, identity_of(spec, deal), number, PreemptionSignal())
    return counts


@pytest.mark.slow
def test_a_slow_rank_computes_fewer_micro_batches_and_the_bits_are_equal(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    (fast, slow) = in_ranks(2, _train, store.url, tmp_path, seconds=120)
    assert slow == [slow[0], slow[0] // 2]
    assert fast[1] + slow[1] == fast[0] + slow[0]
    results = [trained(store, tiny_spec(*RUN, f"parallel.deal={deal}"), deal) for deal in ("equal", "measured")]
    assert results[0] == results[1]
