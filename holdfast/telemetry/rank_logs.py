"""Logs of ranks: the output of each process of a rank, under `runs/<id>/logs/rank-NNNNN/<stream>/`.

`log_stream` writes a stream and states the guarantees; `rank_lines` reads it.
"""

import re
import time
from collections.abc import Callable, Iterator

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json
from holdfast.store.log_stream import DESCRIPTION, LogStream, StreamReader, StreamWriter, stream_name


class RankStream(LogStream):
    """One process of a rank, and the place of its output."""

    rank: int
    launch: int
    attempt: int | None = None  # attempt of the gang that it formed; None before that
    pod: str = ""  # of its node, on Kubernetes...
    namespace: str = ""  # ...and that pod's namespace
    job: str = ""  # the number of its job, in Slurm

    @property
    def writer(self) -> str:
        """See LogStream."""
        return f"rank {self.rank}"


def new_stream(rank: int, launch: int, pid: int, **place: str) -> RankStream:
    """The description of a process that begins now. `place`: its node, pod, namespace and job, if it has them."""
    name = f"{launch:06d}-{stream_name()}"
    return RankStream.model_validate(
        {"name": name, "rank": rank, "launch": launch, "pid": pid, "began": time.time(), **place}
    )


class RankLog(StreamWriter[RankStream]):
    """Writes the stream of one process of a rank."""

    describes_silent = True  # it says where the rank is

    def __init__(self, opened: Callable[[], Store], run_id: str, stream: RankStream) -> None:
        """See StreamWriter."""
        super().__init__(opened, layout.rank_log(run_id, stream.rank), stream)


# Reading the output of a rank of a run from the store, live and after its death.

POLL_SECONDS = 2.0
_STREAM = re.compile(r"/logs/rank-(\d{5,})/((\d{6,})-[^/]+)/")


def rank_streams(store: Store, run_id: str, rank: int) -> list[RankStream]:
    """The processes of a rank whose output is kept, oldest first."""
    streams: dict[str, RankStream] = {}
    for info in store.list(layout.rank_log(run_id, rank)):
        if (match := _STREAM.search(info.key)) and match[2] not in streams:
            streams[match[2]] = _described(store, run_id, rank, match[2], int(match[3]))
    return [streams[name] for name in sorted(streams)]


def ranks_with_logs(store: Store, run_id: str, launch: int | None = None) -> list[int]:
    """The ranks of a run that have a stream in the store: in a launch, or in any."""
    matches = (_STREAM.search(info.key) for info in store.list(layout.rank_log(run_id)))
    return sorted({int(match[1]) for match in matches if match and launch in (None, int(match[3]))})


def rank_lines(
    store: Store,
    run_id: str,
    rank: int,
    *,
    attempt: int | None = None,
    launch: int | None = None,
    running: Callable[[], bool] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[str]:
    """The output lines of a rank: in an attempt, in a launch, or, without either, in its newest process.

    With `running`, continues into later processes while it returns that the run runs; for an attempt, until its process
    has ended. Raises MissingError without any output; with `running` it waits for some first.
    """
    following: dict[str, StreamReader] = {}
    while True:
        is_active = running is not None and running()  # queried first: later output is read again
        streams = rank_streams(store, run_id, rank)
        fitting = [
            stream for stream in streams if attempt in (None, stream.attempt) and launch in (None, stream.launch)
        ]
        if attempt is None and launch is None and not following:
            fitting = fitting[-1:]
        elif attempt is None and launch is None:
            fitting = [stream for stream in fitting if stream.name >= min(following)]
        for stream in fitting:
            reader = StreamReader(store, layout.rank_log(run_id, rank, stream.name))
            yield from following.setdefault(stream.name, reader).new_lines()
        has_ended = attempt is not None and bool(fitting) and all(stream.ended is not None for stream in fitting)
        if not is_active or has_ended:
            break
        time.sleep(poll_seconds)
    if not following:
        raise MissingError(_nothing(store, run_id, rank, streams, attempt, launch))
    for read in following.values():
        yield from read.rest()


def _described(store: Store, run_id: str, rank: int, name: str, launch: int) -> RankStream:
    try:
        return read_json(store, layout.rank_log(run_id, rank, name, DESCRIPTION), RankStream)
    except (MissingError, DataError):  # not written yet
        return RankStream(name=name, rank=rank, launch=launch)


def _nothing(
    store: Store, run_id: str, rank: int, streams: list[RankStream], attempt: int | None, launch: int | None
) -> str:
    if streams:
        available = ", ".join(_of(stream) for stream in streams)
        scope = f"attempt {attempt}" if attempt is not None else f"launch {launch}"
        return f"run {run_id}: nothing that rank {rank} printed in {scope} is kept; there is {available}"
    if ranks := ranks_with_logs(store, run_id):
        several = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        return f"run {run_id}: nothing that rank {rank} printed is kept; there is something of {several}"
    return f"run {run_id}: no rank has printed anything yet, or its log could not be written (see its step's log)"


def _of(stream: RankStream) -> str:
    return f"launch {stream.launch}" + ("" if stream.attempt is None else f" attempt {stream.attempt}")
