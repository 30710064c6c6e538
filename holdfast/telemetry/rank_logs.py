"""Logs of ranks: the output of each process of a rank, under `runs/<id>/logs/rank-NNNNN/<stream>/`.

`log_stream` writes a stream and states the guarantees; `rank_reader` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.store import Store, layout
from holdfast.store.log_stream import LogStream, StreamWriter, stream_name


class RankStream(LogStream):
    """One process of a rank, and the place of its output."""

    rank: int
    launch: int
    attempt: int | None = None  # attempt of the gang that it formed; None before that

    @property
    def writer(self) -> str:
        """See LogStream."""
        return f"rank {self.rank}"


def new_stream(rank: int, launch: int, node: str, pid: int) -> RankStream:
    """The description of a process that begins now."""
    name = f"{launch:06d}-{stream_name()}"
    return RankStream(name=name, rank=rank, launch=launch, node=node, pid=pid, began=time.time())


class RankLog(StreamWriter[RankStream]):
    """Writes the stream of one process of a rank."""

    def __init__(self, opened: Callable[[], Store], run_id: str, stream: RankStream) -> None:
        """See StreamWriter."""
        super().__init__(opened, layout.rank_log(run_id, stream.rank), stream)
