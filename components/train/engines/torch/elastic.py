"""The exchange of `determinism: elastic`: sums over ranks in the order of the grid's tree, at any number of ranks.

Whole replicas (`summed`) add up neighbouring grains each, and then meet once: a rank receives its part of every rank's
partial sums, adds them as the tree says, and tells all the result. With a power of two of ranks that moves what a ring
moves (reduce-scatter, then all-gather); with another number a rank has up to log2(grains) nodes to send instead of one.

Shards (`TreeReduceScatter`) meet at every micro-batch, as FSDP2 does: in a round the ranks compute neighbouring grains,
and each receives its shard of all of them.

Norms (`squared_norm`) are sums of halves, of elements within a row and of rows, so that no cut of the rows shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.components.train.grid import Grid, PartialSums, all_nodes, root

BUCKET_BYTES = 32 * 2**20  # exchanged at once: bounds what is held beside the gradients


def summed(partial: PartialSums, grid: Grid) -> list[Tensor]:
    """The sums over all grains of what every rank has added up, on every rank. A collective call."""
    if grid.ranks == 1:
        return partial.total(grid)
    mine = partial.sums
    result: list[Tensor] = []
    for bucket in _buckets(mine[0]):
        parts = [sums[bucket] for sums in mine]
        flat = _exchanged([torch.cat([part.reshape(-1) for part in node]) for node in parts], grid)
        pieces = flat.split([part.numel() for part in parts[0]])
        result += [piece.view_as(part) for piece, part in zip(pieces, parts[0], strict=True)]
    return result


class TreeReduceScatter:
    """What FSDP2 (`set_custom_reduce_scatter`) calls for one module's gradients in every round. After the last one it
    gives this rank's shard of the sums over all grains; before, nothing that may be used."""

    def __init__(self, grid: Callable[[], Grid]) -> None:
        """`grid` gives that of the step that is computed."""
        self._grid = grid
        self._partial, self._round = PartialSums(), 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See torch's ReduceScatter."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002 - always the sum
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """See torch's ReduceScatter."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        grid = self._grid()
        leaves = min(grid.ranks, grid.grains - self._round * grid.ranks)
        for leaf in received.view(grid.ranks, -1)[:leaves]:
            self._partial.add([leaf])
        self._round += 1
        if self._round == grid.rounds:
            (total,) = self._partial.total(grid)
            output_tensor.copy_(total)
            self._partial, self._round = PartialSums(), 0
        else:
            self._partial.settle()


def squared_norm(shards: Sequence[tuple[Tensor, int, int]], grid: Grid) -> Tensor:
    """The sum of the squares of all elements of some tensors. Of each: this rank's rows, the first one's index, and how
    many rows there are on all ranks. A collective call."""
    rows = shards[0][0].new_zeros(sum(whole for _, _, whole in shards), dtype=torch.float32)
    start = 0
    for shard, first, whole in shards:
        if len(shard):
            squares = shard.float().square().view(len(shard), -1)
            rows[start + first : start + first + len(shard)] = _halved(squares)
        start += whole
    if grid.ranks > 1:
        dist.all_reduce(rows)  # each row is on one rank, and zero on the others
    return _halved(rows.view(1, -1))[0]


def _halved(values: Tensor) -> Tensor:
    """The sum over the last of two dimensions: the second half is added to the first until one is left."""
    while (size := values.shape[1]) > 1:
        half = size // 2
        sums = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat([sums, values[:, 2 * half :]], dim=1) if size % 2 else sums
    return values[:, 0]


def _exchanged(sums: Sequence[Tensor], grid: Grid) -> Tensor:
    """One flat tensor: the sum over all grains, from this rank's nodes (`sums`, flat) and those of all others."""
    size = sums[0].numel()
    share = -(-size // grid.ranks)
    sent = sums[0].new_zeros(grid.ranks, len(sums), share)
    for index, each in enumerate(sums):
        whole, rest = divmod(size, share)
        sent[:whole, index] = each[: whole * share].view(whole, share)
        if rest:
            sent[whole, index, :rest] = each[whole * share :]
    nodes = all_nodes(grid)
    counts = [len(each) for each in nodes]
    received = sent.new_empty(sum(counts), share)
    dist.all_to_all_single(
        received.view(-1), sent.view(-1), [n * share for n in counts], [len(sums) * share] * grid.ranks
    )
    own = root(grid, dict(zip((node for each in nodes for node in each), received, strict=True)))
    gathered = sent.new_empty(grid.ranks * share)
    dist.all_gather_single(gathered, own)
    return gathered[:size]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Runs of tensors of about BUCKET_BYTES."""
    start, size = 0, 0
    for index, tensor in enumerate(tensors):
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES or index == len(tensors) - 1:
            yield slice(start, index + 1)
            start, size = index + 1, 0
