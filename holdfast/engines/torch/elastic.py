"""Communication for `determinism: elastic`: sums over ranks in the order of the grid's tree, for any number of ranks.

- Whole replicas (`GradientSums`) each add neighboring grains and then communicate once. A rank receives its part of
  every rank's partial sums, adds them in tree order, and sends the result to all ranks. With a power of two of ranks,
  this moves as many bytes as a ring (reduce-scatter, then all-gather). Otherwise a rank sends up to log2(grains) nodes
  instead of one. A bucket of gradients is sent as soon as it is complete, while later ones are computed.
- Shards (`TreeReduceScatter`) communicate at every micro-batch, like FSDP2. In a round the ranks compute neighboring
  grains, and each rank receives its shard of all of them.
- Norms (`squared_norm`) are sums by halves, of elements within a row and then of rows. So no division of the rows
  changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast.engines.grid import Grid, PartialSums, all_nodes, root
from holdfast.engines.layout import like, local

ALIGNED = 16  # bytes
LEAST_BUCKETS = 4  # even of a small model, so that computation overlaps an exchange


class GradientSums:
    """Sums of whole replicas' gradients over all grains. It takes gradients from the parameters grain by grain, and
    finally assigns the sums to them. Call every method on every rank, in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, bucket_bytes: float) -> None:
        """`bucket_bytes` limits the gradients that are exchanged together."""
        self._rank = rank
        self._buckets = [_Bucket(run) for run in _runs(parameters[::-1], bucket_bytes)]  # in the order of computation
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._came, bucket))

    def begin_step(self, grid: Grid) -> None:
        """Begin a step with this grid."""
        self._grid, self._under_way = grid, 0
        for bucket in self._buckets:
            bucket.begin_step(grid, self._rank)

    def take(self) -> None:
        """Take the gradients of a finished grain that no hook reported, such as those of shards that are whole."""
        for bucket in self._buckets:
            if bucket.missing:
                self._take(bucket)
            bucket.missing = len(bucket.parameters)

    def give(self) -> None:
        """Finish a step in which all of this rank's grains were taken. Waits until each parameter has its sum as its
        gradient."""
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
        # Send buckets in the same order on every rank, because collectives are matched by their order.
        while self._under_way < len(self._buckets) and not self._buckets[self._under_way].left:
            self._buckets[self._under_way].send()
            if self._under_way:
                self._buckets[self._under_way - 1].meet()
            self._under_way += 1


class _Bucket:
    """Parameters whose gradients are summed together and exchanged as one flat tensor. The calls are `begin_step`,
    `take` for each grain, `send` and `meet` between ranks, and `give`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)  # missing gradients of the current grain
        self.left = 0  # grains
        self._grid = Grid(1, 1)

    def begin_step(self, grid: Grid, rank: int) -> None:
        """Begin a step."""
        share = grid.share(rank)
        self._sums, self.left = PartialSums(share.start), len(share)
        if grid == self._grid:
            return
        self._grid, self._nodes = grid, all_nodes(grid)
        if grid.ranks > 1:
            # Sums of one node, and finally of all grains. The memory is kept because new memory must be mapped. Each
            # gradient starts at the alignment of separately allocated memory: kernels read, and may add, four elements
            # together only there. The padding after a gradient provides that alignment and equal parts for the ranks.
            # It is never read.
            sizes, unit = (
                [parameter.numel() for parameter in self.parameters],
                ALIGNED // self.parameters[0].element_size(),
            )
            rooms = [-(-size // unit) * unit for size in sizes]
            self._flat = self.parameters[0].detach().new_zeros(grid.ranks, -(-sum(rooms) // grid.ranks))
            self._views = [
                room[:size].view_as(parameter)
                for room, size, parameter in zip(
                    self._flat.view(-1)[: sum(rooms)].split(rooms), sizes, self.parameters, strict=True
                )
            ]

    def take(self) -> None:
        """Take the gradients of one grain, and clear the parameters' `grad`."""
        gradients = [local(weights.grad) for weights in self.parameters if weights.grad is not None]
        assert len(gradients) == len(self.parameters), "a parameter that takes no part in the loss"
        for parameter in self.parameters:
            parameter.grad = None
        self._sums.add(gradients)
        self.missing, self.left = 0, self.left - 1

    def send(self) -> None:
        """Start sending this rank's partial sums to the ranks that add one part each."""
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
            self._received.view(-1),
            self._sent.view(-1),
            [count * share for count in counts],
            [mine * share] * ranks,
            async_op=True,
        )

    def meet(self) -> None:
        """Add the received part, start sending the result to all ranks, and free the inputs."""
        self._work.wait()
        nodes = (node for level in self._nodes for node in level)
        self._received = root(self._grid, dict(zip(nodes, self._received, strict=True))).clone()
        del self._sent
        self._work = dist.all_gather_single(self._flat.view(-1), self._received, async_op=True)

    def give(self) -> None:
        """Wait for the sums over all grains, and assign them as gradients."""
        if self._grid.ranks > 1:
            self._work.wait()
            totals = self._views
            del self._work, self._received
        else:
            totals = self._sums.total(self._grid)
        for parameter, total in zip(self.parameters, totals, strict=True):
            parameter.grad = like(parameter, total)


class TreeReduceScatter:
    """A custom reduce-scatter for FSDP2 (`set_custom_reduce_scatter`), called for one module's gradients in every
    round. After the last round it returns this rank's shard of the sums over all grains. Earlier outputs must not be
    used."""

    def __init__(self, grid: Callable[[], Grid]) -> None:
        """`grid` returns the grid of the current step."""
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
    """The sum of the squares of all elements of some tensors. Each entry of `shards` has this rank's rows, the index of
    the first one, and the number of rows on all ranks. A collective call if the grid has several ranks."""
    return _halved(_squared_rows(shards, grid.ranks > 1).view(1, -1))[0]


def squared_norms(shards: Sequence[tuple[Tensor, int, int]], *, together: bool) -> list[Tensor]:
    """Like `squared_norm`, for each tensor separately. `together` sums over ranks, which makes it a collective call."""
    rows = _squared_rows(shards, together)
    return [_halved(part.view(1, -1))[0] for part in rows.split([size for _, _, size in shards])]


def _squared_rows(shards: Sequence[tuple[Tensor, int, int]], together: bool) -> Tensor:
    """The sums of the squares of each row of all tensors."""
    rows = shards[0][0].new_zeros(sum(size for _, _, size in shards), dtype=torch.float32)
    start = 0
    for shard, first, size in shards:
        if len(shard):
            squares = shard.float().square().view(len(shard), -1)
            rows[start + first : start + first + len(shard)] = _halved(squares)
        start += size
    if together:
        dist.all_reduce(rows)  # each row is on one rank and zero elsewhere, or its columns are split over ranks
    return rows


def _halved(values: Tensor) -> Tensor:
    """Sum over the last of two dimensions, in place. Adds the second half to the first until one element is left. The
    last element of an odd number is carried into the next round."""
    while (size := values.shape[1]) > 1:
        half = size // 2
        values[:, :half] += values[:, half : 2 * half]
        if size % 2:
            values[:, half] = values[:, size - 1]
        values = values[:, : size - half]
    return values[:, 0]


def over_grains(losses: Tensor, grid: Grid) -> Tensor:
    """The sum of the losses of all grains in tree order. Each is on one rank, and zero elsewhere. A collective call if
    the grid has several ranks."""
    if grid.ranks > 1:
        dist.all_reduce(losses)
    total = PartialSums()
    for loss in losses[: grid.grains]:
        total.add([loss])
    return total.total(grid)[0]


def _runs(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> Iterator[Sequence[nn.Parameter]]:
    """Runs of neighboring parameters. A run of several is at most `bucket_bytes` large."""
    sizes = [local(parameter).numel() * parameter.element_size() for parameter in parameters]
    most = min(bucket_bytes, sum(sizes) / LEAST_BUCKETS)
    start, run_bytes = 0, 0
    for index, size in enumerate(sizes):
        if run_bytes and run_bytes + size > most:
            yield parameters[start:index]
            start, run_bytes = index, 0
        run_bytes += size
    yield parameters[start:]
