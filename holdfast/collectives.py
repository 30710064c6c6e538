"""The gang: the ranks of a run, and the few bookkeeping collectives by which they agree.

They run on a separate gloo group, so they never queue behind the collectives of training, and work on every
accelerator. A single process is a gang of one that needs no process group. A collective that fails because another rank
is gone raises LostPeerError.

Values cross as JSON of a type that the caller names, and are validated on arrival. Nothing from a peer is unpickled:
see `use_json_for_objects` for the collectives of torch and of libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch.distributed import distributed_c10d

from holdfast.spec.errors import DataError, ExitCode, HoldfastError, HungError, LostPeerError, error_named

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20  # of one rank: the catalog of a model of 100,000 tensors takes a sixth of it

# gloo's messages, in a plain RuntimeError, when a connection ends or is silent. An `enforce fail` is a bug.
_GLOO = re.compile(r"^\[[^\]]*gloo/(transport|rendezvous)/|^Application timeout caused pair closure|connectFullMesh")
_MISUSE = re.compile(r"enforce fail|ncclInvalidUsage|ncclInvalidArgument|invalid (usage|argument)", re.I)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception of a collective means that another rank is gone, and not that this rank is wrong."""
    if _MISUSE.search(str(error)):
        return False
    is_torch_error = isinstance(error, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError))
    return is_torch_error or (type(error) is RuntimeError and _GLOO.search(str(error)) is not None)


@contextmanager
def noticing_lost_peers() -> Iterator[None]:
    """Raises LostPeerError for a collective inside that failed because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if is_lost_peer(error):
            raise LostPeerError(f"another rank went away: {str(error).splitlines()[0][:300]}") from error
        raise


class Gang:
    """`rank` of `size`, over one gloo group. Each thread that communicates needs its own gang."""

    def __init__(self, timeout_seconds: float = 3600.0) -> None:
        """A collective call if a process group has been initialized. The timeout covers the slowest rank's reading or
        writing. A rank that dies is noticed immediately, by its closed connections."""
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def broadcast(self, value: T, kind: Any, source: int = 0) -> T:
        """The value of rank `source`, on every rank; values of other ranks are ignored. `kind` is its type, such as
        `Plan | None`. Raises DataError for a message of another type."""
        if self._group is None:
            return value
        message = _encoded(value, kind) if self.rank == source else b""
        size = torch.tensor([len(message)])
        with noticing_lost_peers():
            dist.broadcast(size, src=source, group=self._group)
            data = _bytes(message, _require_size(int(size)))
            dist.broadcast(data, src=source, group=self._group)
        received: T = _decoded(data.numpy().tobytes(), kind)
        return received

    def from_rank_0(self, action: Callable[[], T], kind: Any = NoneType) -> T:
        """The result of `action` on rank 0, on every rank; `kind` is its type. Its HoldfastError is raised on every
        rank."""
        result: T | None = None
        error: HoldfastError | None = None
        if self.rank == 0:
            try:
                result = action()
            except HoldfastError as raised:
                error = raised
        failure = None if error is None else _Failure.of(error)
        result, failure = self.broadcast((result, failure), tuple[kind | None, _Failure | None])
        if failure is not None:
            raise error or failure.error
        return cast(T, result)

    def all_gather(self, value: T, kind: Any) -> list[T]:
        """Every rank's value, in the order of ranks. `kind` is the type of each. Raises DataError for a message of
        another type."""
        if self._group is None:
            return [value]
        message = _encoded(value, kind)
        announced = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with noticing_lost_peers():
            dist.all_gather(announced, torch.tensor([len(message)]), group=self._group)
            sizes = [_require_size(int(size)) for size in announced]
            longest = max(sizes)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, _bytes(message, longest), group=self._group)
        return [_decoded(part.numpy()[:size].tobytes(), kind) for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._group is not None:
            with noticing_lost_peers():
                dist.barrier(group=self._group)

    def meet(self, seconds: float, where: str) -> None:
        """Wait at most `seconds` for every rank. Raises HungError on rank 0, which names the missing ranks, and
        LostPeerError on other ranks."""
        if self._group is None:
            return
        try:
            dist.monitored_barrier(group=self._group, timeout=timedelta(seconds=seconds), wait_all_ranks=True)
        except RuntimeError as error:
            text = " ".join(str(error).split())[:300]
            if self.rank == 0:
                raise HungError(f"{where}, ranks did not come within {seconds:g} s: {text}") from error
            raise LostPeerError(f"{where}, another rank did not come within {seconds:g} s: {text}") from error

    def any_later(self, flag: bool) -> PendingFlag:
        """Start to reduce whether `flag` holds on any rank. The result is ready when `result()` is called a step
        later."""
        value = torch.tensor([int(flag)])
        work = (
            None if self._group is None else dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        )
        return PendingFlag(value, work)

    def gather_later(self, values: Sequence[float]) -> PendingValues:
        """Start to gather every rank's values, the same number from each. They are ready when `result()` is called a
        step later."""
        own = torch.tensor(values, dtype=torch.float64)
        all_of_them = [torch.empty_like(own) for _ in range(self.size)]
        if self._group is None:
            return PendingValues([own], None)
        return PendingValues(all_of_them, dist.all_gather(all_of_them, own, group=self._group, async_op=True))


class _Failure(BaseModel, extra="forbid"):
    """A HoldfastError in transit to the other ranks."""

    name: str
    words: str
    code: ExitCode

    @classmethod
    def of(cls, error: HoldfastError) -> _Failure:
        return cls(name=type(error).__name__, words=str(error), code=error.exit_code)

    @property
    def error(self) -> HoldfastError:
        error = error_named(self.name, self.words)
        error.exit_code = self.code
        return error


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _encoded(value: Any, kind: Any) -> bytes:
    return json.dumps(_adapter(kind).dump_python(value, mode="json")).encode()  # with Infinity and NaN


def _decoded(message: bytes, kind: Any) -> Any:
    try:
        return _adapter(kind).validate_json(message)
    except ValidationError as error:
        raise DataError(
            f"another rank sent {message[:60]!r}, which is not a {kind}; the ranks run different versions of Holdfast, "
            f"or a process outside the job answers for a rank ({error.error_count()} problems)"
        ) from None


def _require_size(size: int) -> int:
    if not 0 <= size <= MAX_MESSAGE_BYTES:
        raise DataError(f"another rank announces a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    return size


def _bytes(message: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(message.ljust(max(size, 1), b"\0")), dtype=torch.uint8)[:size]


def use_json_for_objects() -> None:
    """Make the object collectives of torch send JSON in this process, also for libraries that call them.

    These are `all_gather_object`, `broadcast_object_list`, `send_object_list` and so on. torch's own unpickle the
    message of a peer, which runs any code that the peer names. A value that is not plain JSON raises TypeError.
    """
    for name in ("_object_to_tensor", "_tensor_to_object"):
        if not hasattr(distributed_c10d, name):
            raise ImportError(f"torch {torch.__version__} has no {name}: its object collectives cannot be made safe")
    distributed_c10d._object_to_tensor = _to_tensor
    distributed_c10d._tensor_to_object = _from_tensor


def _to_tensor(value: Any, device: torch.device | str, _group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    message = json.dumps(value)
    if json.loads(message) != value:
        raise TypeError(f"{value!r:.200} is not plain JSON: ranks exchange nothing else")
    data = _bytes(message.encode(), len(message)).clone()  # torch makes it longer
    return data.to(device), torch.tensor([len(message)], device=device)


def _from_tensor(data: torch.Tensor, size: Any, _group: Any = None) -> Any:
    return json.loads(data.cpu().numpy().tobytes()[: int(size)])


class PendingValues:
    """Values in transit: see `Gang.gather_later`."""

    def __init__(self, values: Sequence[torch.Tensor], work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def result(self) -> list[list[float]]:
        """The values of every rank, in the order of ranks."""
        if self._work is not None:
            with noticing_lost_peers():
                self._work.wait()
        return [column.tolist() for column in self._values]


class PendingFlag:
    """A flag in transit: see `Gang.any_later`."""

    def __init__(self, value: torch.Tensor, work: dist.Work | None) -> None:
        self._value, self._work = value, work

    def result(self) -> bool:
        """Whether the flag held on any rank. Every rank gets the same result."""
        if self._work is not None:
            with noticing_lost_peers():
                self._work.wait()
        return bool(self._value.item())
