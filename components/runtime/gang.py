"""The gang: the ranks of a run, and the few bookkeeping collectives that they agree by.

They run on a gloo group of their own, so that they never queue behind the collectives of training and work the same on
every accelerator. A single process is a gang of one that needs no process group. A collective that fails because
another rank went away raises LostPeerError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdfast.components.spec.errors import HoldfastError, HungError, LostPeerError

T = TypeVar("T")

# What gloo says, in a plain RuntimeError, when a connection ends or stays silent. An `enforce fail` of it is a bug.
_GLOO = re.compile(r"^\[[^\]]*gloo/(transport|rendezvous)/|^Application timeout caused pair closure|connectFullMesh")
_MISUSE = re.compile(r"enforce fail|ncclInvalidUsage|ncclInvalidArgument|invalid (usage|argument)", re.I)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception of a collective says that another rank went away, and not that this one is wrong."""
    if _MISUSE.search(str(error)):
        return False
    known = isinstance(error, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError))
    return known or (type(error) is RuntimeError and _GLOO.search(str(error)) is not None)


@contextmanager
def noticing_lost_peers() -> Iterator[None]:
    """A collective inside that failed because another rank went away raises LostPeerError."""
    try:
        yield
    except RuntimeError as error:
        if is_lost_peer(error):
            raise LostPeerError(f"another rank went away: {str(error).splitlines()[0][:300]}") from error
        raise


class Gang:
    """`rank` of `size`, over one gloo group. Each thread that talks needs a gang of its own."""

    def __init__(self, timeout_seconds: float = 3600.0) -> None:
        """A collective call when a process group has been initialised. The timeout covers the slowest rank's reading or
        writing; a rank that dies is noticed at once, by its closed connections."""
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank; what the others pass does not matter."""
        box = [value]
        if self._group is not None:
            with noticing_lost_peers():
                dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def from_rank_0(self, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0, on every rank. A HoldfastError of it is raised on every rank."""
        result: T | HoldfastError | None = None
        if self.rank == 0:
            try:
                result = action()
            except HoldfastError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, HoldfastError):
            raise result
        return result

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with noticing_lost_peers():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._group is not None:
            with noticing_lost_peers():
                dist.barrier(group=self._group)

    def meet(self, seconds: float, where: str) -> None:
        """Wait for every rank so long at most. Raises HungError on rank 0, which names the ranks that did not come, and
        LostPeerError on the others."""
        if self._group is None:
            return
        try:
            dist.monitored_barrier(group=self._group, timeout=timedelta(seconds=seconds), wait_all_ranks=True)
        except RuntimeError as error:
            words = " ".join(str(error).split())[:300]
            if self.rank == 0:
                raise HungError(f"{where}, ranks did not come within {seconds:g} s: {words}") from error
            raise LostPeerError(f"{where}, another rank did not come within {seconds:g} s: {words}") from error

    def any_later(self, flag: bool) -> PendingFlag:
        """Start to ask whether `flag` holds on any rank; the answer is ready when `result()` is called a step later."""
        value = torch.tensor([int(flag)])
        work = (
            None if self._group is None else dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        )
        return PendingFlag(value, work)

    def gather_later(self, values: Sequence[float]) -> PendingValues:
        """Start to gather every rank's values, as many from each; they are ready when `result()` is called a step
        later."""
        mine = torch.tensor(values, dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        if self._group is None:
            return PendingValues([mine], None)
        return PendingValues(all_of_them, dist.all_gather(all_of_them, mine, group=self._group, async_op=True))


class PendingValues:
    """Values on their way: see `Gang.gather_later`."""

    def __init__(self, values: Sequence[torch.Tensor], work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def result(self) -> list[list[float]]:
        """Those of every rank, in the order of ranks."""
        if self._work is not None:
            with noticing_lost_peers():
                self._work.wait()
        return [each.tolist() for each in self._values]


class PendingFlag:
    """An answer on its way: see `Gang.any_later`."""

    def __init__(self, value: torch.Tensor, work: dist.Work | None) -> None:
        self._value, self._work = value, work

    def result(self) -> bool:
        """Whether the flag held on any rank. Every rank gets the same answer."""
        if self._work is not None:
            with noticing_lost_peers():
                self._work.wait()
        return bool(self._value.item())
