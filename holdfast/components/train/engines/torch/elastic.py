"""The exchange of `determinism: elastic`: sums over ranks in the order of the grid's tree, at any number of ranks.

Whole replicas (`GradientSums`) add up neighbouring grains each, and then meet once: a rank receives its part of every
rank's partial sums, adds them as the tree says, and tells all the result. With a power of two of ranks that moves what
a ring moves (reduce-scatter, then all-gather); with another number a rank has up to log2(grains) nodes to send instead
of one. A bucket of gradients is on its way as soon as they are there, while others are still computed.

Shards (`TreeReduceScatter`) meet at every micro-batch, as FSDP2 does: in a round the ranks compute neighbouring grains,
and each receives its shard of all of them.

Norms (`squared_norm`) are sums of halves, of elements within a row and of rows, so that no cut of the rows shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.components.train.engines.layout import like, local
from holdfast.components.train.grid import Grid, PartialSums, all_nodes, root

ALIGNED = 16  # bytes
LEAST_BUCKETS = 4  # of a model however small, so that something is computed beside an exchange


class GradientSums:
    """Takes the gradients of whole replicas from their parameters, grain by grain, and in the end gives these the sums
    over all grains. Every method is called on every rank, in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, bucket_bytes: float) -> None:
        """`bucket_bytes`: of gradients, at most, that go round together."""
        self._rank = rank
        self._buckets = [_Bucket(run) for run in _runs(parameters[::-1], bucket_bytes)]  # as gradients come about
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._came, bucket))

    def begin_step(self, grid: Grid) -> None:
        """A step begins, whose grains are dealt so."""
        self._grid, self._under_way = grid, 0
        for bucket in self._buckets:
            bucket.begin_step(grid, self._rank)

    def take(self) -> None:
        """A grain's backward pass is over: take what no hook has told of, as of shards that are whole."""
        for bucket in self._buckets:
            if bucket.missing:
                self._take(bucket)
            bucket.missing = len(bucket.parameters)

    def give(self) -> None:
        """All of this rank's grains were taken: wait until each parameter has its sum for a gradient."""
        if self._grid.ranks > 1:
            assert self._under_way == len(self._buckets)
            self._buckets[-1].meet()
        for bucket in self._buckets:
            bucket.give()

    def _came(self, bucket: _Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        if not bucket.missing:
            self._take(bucket)

    def _take(self, bucket: _Bucket) -> None:
        bucket.take()
        if self._grid.ranks == 1:
            return
        # On every rank the same one after the other, whatever was there first: collectives are told apart by that.
        while self._under_way < len(self._buckets) and not self._buckets[self._under_way].left:
            self._buckets[self._under_way].send()
            if self._under_way:
                self._buckets[self._under_way - 1].meet()
            self._under_way += 1


class _Bucket:
    """Parameters whose gradients are summed together, and go round as one flat tensor: `begin_step`, `take` for each
    grain, between ranks `send` and `meet`, and `give`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)  # gradients of the grain that is computed
        self.left = 0  # grains
        self._grid = Grid(1, 1)

    def begin_step(self, grid: Grid, rank: int) -> None:
        """A step begins."""
        share = grid.share(rank)
        self._sums, self.left = PartialSums(share.start), len(share)
        if grid == self._grid:
            return
        self._grid, self._nodes = grid, all_nodes(grid)
        if grid.ranks > 1:
            # The sums of one node, and in the end of all grains: kept, as memory that is new must be mapped. Gradients
            # begin where memory that is their own would allow, as kernels read by fours, and may add by fours, only
            # there. What is behind a gradient makes room for that, and the ranks' parts equal, and is never read.
            sizes, unit = [each.numel() for each in self.parameters], ALIGNED // self.parameters[0].element_size()
            rooms = [-(-size // unit) * unit for size in sizes]
            self._flat = self.parameters[0].detach().new_zeros(grid.ranks, -(-sum(rooms) // grid.ranks))
            self._views = [
                room[:size].view_as(each)
                for room, size, each in zip(
                    self._flat.view(-1)[: sum(rooms)].split(rooms), sizes, self.parameters, strict=True
                )
            ]

    def take(self) -> None:
        """The gradients of a grain, which come to an end as such."""
        gradients = [local(each.grad) for each in self.parameters if each.grad is not None]
        assert len(gradients) == len(self.parameters), "a parameter that takes no part in the loss"
        for parameter in self.parameters:
            parameter.grad = None
        self._sums.add(gradients)
        self.missing, self.left = 0, self.left - 1

    def send(self) -> None:
        """This rank's partial sums set out, to the ranks that add up a part each."""
        counts, (ranks, share) = [len(nodes) for nodes in self._nodes], self._flat.shape
        sums, mine = self._sums.sums, len(self._sums.sums)
        self._sent = self._flat if mine == 1 else self._flat.new_empty(ranks, mine, share)
        for number in range(mine):
            torch._foreach_copy_(self._views, sums[number])
            if mine > 1:
                self._sent[:, number] = self._flat
        sums.clear()
        self._received = self._flat.new_empty(sum(counts), share)
        self._work = dist.all_to_all_single(
            self._received.view(-1), self._sent.view(-1), [count * share for count in counts], [mine * share] * ranks,
            async_op=True,
        )  # fmt: skip

    def meet(self) -> None:
        """What this rank adds up has come, and sets out to all. What it was made of goes."""
        self._work.wait()
        nodes = (node for each in self._nodes for node in each)
        self._received = root(self._grid, dict(zip(nodes, self._received, strict=True))).clone()
        del self._sent
        self._work = dist.all_gather_single(self._flat.view(-1), self._received, async_op=True)

    def give(self) -> None:
        """Wait for the sums over all grains, and make them the gradients."""
        if self._grid.ranks > 1:
            self._work.wait()
            totals = self._views
            del self._work, self._received
        else:
            totals = self._sums.total(self._grid)
        for parameter, total in zip(self.parameters, totals, strict=True):
            parameter.grad = like(parameter, total)


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
    return _halved(_squared_rows(shards, grid.ranks > 1).view(1, -1))[0]


def squared_norms(shards: Sequence[tuple[Tensor, int, int]], *, together: bool) -> list[Tensor]:
    """The same of each tensor by itself; `together`: with other ranks, which makes it a collective call."""
    rows = _squared_rows(shards, together)
    return [_halved(part.view(1, -1))[0] for part in rows.split([whole for _, _, whole in shards])]


def _squared_rows(shards: Sequence[tuple[Tensor, int, int]], together: bool) -> Tensor:
    """The sums of the squares of all rows of all tensors."""
    rows = shards[0][0].new_zeros(sum(whole for _, _, whole in shards), dtype=torch.float32)
    start = 0
    for shard, first, whole in shards:
        if len(shard):
            squares = shard.float().square().view(len(shard), -1)
            rows[start + first : start + first + len(shard)] = _halved(squares)
        start += whole
    if together:
        dist.all_reduce(rows)  # each row is on one rank, and zero on the others, or the columns of a rank are cut
    return rows


def _halved(values: Tensor) -> Tensor:
    """The sum over the last of two dimensions, in whose place it comes about: the second half is added to the first
    until one is left. What is left over of an odd number goes on as the last one."""
    while (size := values.shape[1]) > 1:
        half = size // 2
        values[:, :half] += values[:, half : 2 * half]
        if size % 2:
            values[:, half] = values[:, size - 1]
        values = values[:, : size - half]
    return values[:, 0]


def over_grains(losses: Tensor, grid: Grid) -> Tensor:
    """The sum of the losses of all grains, of which each is on one rank, and zero on the others. A collective call."""
    if grid.ranks > 1:
        dist.all_reduce(losses)
    total = PartialSums()
    for loss in losses[: grid.grains]:
        total.add([loss])
    return total.total(grid)[0]


def _runs(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> Iterator[Sequence[nn.Parameter]]:
    """Neighbours, of at most `bucket_bytes` together if they are several."""
    sizes = [local(each).numel() * each.element_size() for each in parameters]
    most = min(bucket_bytes, sum(sizes) / LEAST_BUCKETS)
    start, held = 0, 0
    for index, size in enumerate(sizes):
        if held and held + size > most:
            yield parameters[start:index]
            start, held = index, 0
        held += size
    yield parameters[start:]
