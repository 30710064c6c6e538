"""`determinism: elastic`: the bits do not depend on the number of ranks, nor on when it changed."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import read_manifest
from holdfast.engines.grid import Grid, Node, PartialSums, root
from holdfast.engines.torch.elastic import GradientSums, _Bucket
from holdfast.spec.errors import SpecError
from holdfast.store import open_store
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, identity_of, join, train_in_ranks, trained
from tests.train.tiny_run import new_store, tiny_spec

ALL_GRIDS = [Grid(grains, ranks) for grains in range(1, 18) for ranks in range(1, grains + 1)]


def values(grains: int) -> list[torch.Tensor]:
    """Numbers whose sum depends on the order."""
    noise = torch.Generator().manual_seed(grains)
    return [torch.randn(64, generator=noise) * 10.0 ** (grain % 5) for grain in range(grains)]


def by_definition(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The tree, level by level: neighbors are added, and a single last item passes unchanged."""
    while len(leaves) > 1:
        pairs = [leaves[at : at + 2] for at in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def test_the_grains_are_dealt_once_and_nearly_equally() -> None:
    for grid in ALL_GRIDS:
        shares = [grid.share(rank) for rank in range(grid.ranks)]
        assert [grain for share in shares for grain in share] == list(range(grid.grains))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_sum_is_the_same_tree_at_every_number_of_ranks() -> None:
    for grid in ALL_GRIDS:
        leaves = values(grid.grains)
        sums: dict[Node, torch.Tensor] = {}
        for rank in range(grid.ranks):
            partial = PartialSums(grid.share(rank).start)
            for grain in grid.share(rank):
                partial.add([leaves[grain].clone()])
            sums |= dict(zip(grid.nodes(rank), (node[0] for node in partial.sums), strict=True))
        assert torch.equal(root(grid, sums), by_definition(leaves)), grid


def test_a_rank_keeps_few_sums() -> None:
    assert Grid(1024, 1).nodes(0) == [(10, 0)]
    assert all(len(Grid(1024, 8).nodes(rank)) == 1 for rank in range(8))
    assert max(len(Grid(1024, 7).nodes(rank)) for rank in range(7)) <= 2 * 7
    partial, most = PartialSums(), 0
    for _ in range(1024):
        partial.add([torch.ones(1)])
        most = max(most, len(partial.sums))
    assert most <= 11


def test_more_ranks_than_grains_are_refused() -> None:
    with pytest.raises(SpecError, match="too many for the 4 micro-batches"):
        Grid(4, 5)


def test_an_exchange_keeps_one_copy_of_the_gradients_with_normal_alignment(tmp_path: Path) -> None:
    for rank, (is_equal, is_aligned, copies_met, copies_kept) in enumerate(
        in_ranks(3, _exchange, tmp_path / "meeting", seconds=300)
    ):
        assert is_equal, rank
        assert is_aligned, rank
        assert copies_met < MOST_MET, rank
        assert copies_kept < MOST_KEPT, rank


SIZES = (5001, 5003, 10, 4997, 5005, 4999, 3)  # some buckets have several parameters
MOST_MET, MOST_KEPT = 1.4, 1.05  # copies; this rank's partial sums are a third of one copy


def _exchange(rank: int, size: int, folder: Path) -> tuple[bool, bool, float, float]:
    """Whether gradients equal the sums of the tree and are aligned. Also the number of gradient copies after the
    exchange of all buckets, and at the end. Ranks 1 and 2 have two nodes each.
    """
    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    gc.collect()
    gc.freeze()  # objects of the imports, which `_bytes_of_tensors` would search at each bucket
    grid, parameters = Grid(8, size), [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    sums, original_meet, met = GradientSums(parameters, rank, 1e9), _Bucket.meet, list[float]()

    def meet(bucket: _Bucket) -> None:
        original_meet(bucket)
        if bucket is sums._buckets[-1]:
            met.append(copies(MOST_MET))

    def copies(most: float) -> float:
        """Copies of gradients in memory. Gloo's threads release what they sent a moment after `wait` has returned, so
        `most` or more count only if they stay."""
        deadline = time.monotonic() + 60.0
        while (found := (_bytes_of_tensors() - before) / whole) >= most and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    _Bucket.meet = meet  # type: ignore[method-assign,assignment]
    before, whole = _bytes_of_tensors(), 4 * sum(SIZES)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        sums.begin_step(grid)
        for grain in grid.share(rank):
            sum((parameter * values_of(grain, parameter)).sum() for parameter in parameters).backward()  # type: ignore[union-attr]
            sums.take()
        sums.give()
    copies_kept = copies(MOST_KEPT)
    expected = [by_definition([values_of(grain, parameter) for grain in range(8)]) for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    equal = all(map(torch.equal, gradients, expected))
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in gradients)
    return equal, aligned, max(met), copies_kept


def values_of(grain: int, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a grain."""
    return torch.randn(len(parameter), generator=torch.Generator().manual_seed(grain)) * 10.0 ** (grain % 5)


def _bytes_of_tensors() -> int:
    """The size of all memory that tensors of this process use."""
    gc.collect()
    storages = [
        tensor.untyped_storage() for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def overrides_of(ranks: int, *more: str) -> tuple[str, ...]:
    return ("training.determinism=elastic", f"parallel.processes={ranks}", "training.steps=6", *more)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp fp32": ("parallel.strategy=ddp",),
    "fsdp bf16": ("parallel.strategy=fsdp", "training.precision=bf16", "data.document_masks=true"),
}
_MIXTURE = ("model.experts=4", "model.ffn=24")
LAYOUTS |= {
    "mixture ddp": (
        *_MIXTURE, "model.family=mixtral", "model.routing.coefficient=0.1", "data.document_masks=true",
        "model.sliding_window=5",
    ),
    # Biases follow the load of each expert. A spare grain of a rank does not count.
    "mixture fsdp": (
        *_MIXTURE, "model.family=dots1", "model.routing={balance: bias, bias_step: 0.01, shared: 1}",
        "parallel.strategy=fsdp",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of a single rank for every layout: digest and history."""
    folder = tmp_path_factory.mktemp("calm")
    store = new_store(folder / "store")
    runs: Runs = [(overrides_of(1, *layout), name, None) for name, layout in LAYOUTS.items()]
    assert train_in_ranks(1, store.url, folder / "ranks", runs) == [""] * len(runs)
    return {name: trained(store, tiny_spec(*overrides_of(1, *layout)), name) for name, layout in LAYOUTS.items()}


@pytest.mark.slow
def test_ranks_that_leave_and_join_during_a_run_change_no_bit(calm: dict[str, Any], tmp_path: Path) -> None:
    """The number of ranks leaves no trace: gangs of two, three and four ranks compute steps of every layout."""
    store = new_store(tmp_path / "store")
    for ranks, stop_after in ((4, 1), (2, 3), (3, None)):
        runs: Runs = [(overrides_of(ranks, *layout), name, stop_after) for name, layout in LAYOUTS.items()]
        endings = train_in_ranks(ranks, store.url, tmp_path / str(stop_after), runs)
        assert endings == ["" if stop_after is None else "PreemptedError"] * len(runs)
    for name, layout in LAYOUTS.items():
        spec = tiny_spec(*overrides_of(3, *layout))
        assert trained(store, spec, name) == calm[name]
        manifest = read_manifest(open_store(store.url), identity_of(spec, name), 6)
        assert len(manifest.segments) == 1  # the plan did not change: the number of ranks is not part of it
        assert manifest.layout["world_size"] == 3
