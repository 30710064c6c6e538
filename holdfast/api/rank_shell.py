"""Commands in the place of a rank of a running run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.api.submission import AS_RECORDED, Location, find_backend, open_store_at
from holdfast.spec.errors import MissingError

if TYPE_CHECKING:
    from holdfast.store import Store
    from holdfast.telemetry.rank_logs import RankStream


@dataclass(frozen=True)
class RankCommand:
    """A command line that runs a command in the place of a rank, and where that is."""

    run_id: str
    rank: int
    launch: int
    node: str  # by its scheduler's name
    pid: int  # of the rank, on its node
    argv: tuple[str, ...]  # the command line, on this machine


def rank_command(
    run: str, rank: int = 0, command: Sequence[str] = (), *, at: Location = AS_RECORDED, terminal: bool = False
) -> RankCommand:
    """The command line that runs `command`, or a shell, in the place of a rank of a running run. Starts nothing.

    It has the rank's environment and working folder, and the exit code of `command`. `terminal`: it is used from a
    terminal. Raises MissingError if the run does not run, has no such rank, or is where no node can be entered.
    """
    from holdfast.pipelines.backends.rank_shell import RankShell
    from holdfast.pipelines.view.catalog import find_run

    opened_store = open_store_at(at.store)
    record = find_run(opened_store, run)
    backend, backend_id = find_backend(run, at)
    status = backend.status(backend_id)
    if not status.unfinished:
        raise MissingError(
            f"run {record.run_id}: is {status.state} on {status.backend}, so no rank runs; "
            f"to continue: holdfast resume {record.run_id}"
        )
    process = _running_process(opened_store, record.run_id, rank)
    cluster = record.known_spec(opened_store).cluster
    shell = RankShell(record.run_id, process, cluster, tuple(command), terminal)
    argv = tuple(backend.rank_shell(shell))
    return RankCommand(record.run_id, rank, process.launch, process.node, process.pid, argv)


def _running_process(store: Store, run_id: str, rank: int) -> RankStream:
    """The process of a rank in the newest launch. Raises MissingError if it does not run."""
    from holdfast.launch.launches import newest_launch
    from holdfast.telemetry.rank_logs import rank_streams, ranks_with_logs

    launch = newest_launch(store, run_id)
    processes = [process for process in rank_streams(store, run_id, rank) if process.launch == launch]
    if processes and processes[-1].ended is None:
        return processes[-1]
    if processes:
        raise MissingError(
            f"run {run_id}: rank {rank} of launch {launch} has ended; if the run continues, run the same command "
            "again when the next launch has begun"
        )
    if ranks := ranks_with_logs(store, run_id, launch):
        raise MissingError(f"run {run_id}: there is no rank {rank}; launch {launch} has {_text_of(ranks)}")
    raise MissingError(
        f"run {run_id}: no rank runs yet; run the same command again when training has begun. Its steps: "
        f"holdfast show {run_id} --steps"
    )


def _text_of(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"1 rank, {ranks[0]}"
