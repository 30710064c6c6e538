"""Exit reports: how the ranks of one node ended, as typed records, and the one exit code that follows from them.

torchrun itself exits with 1 for any code of its ranks, but a restart policy that reads exit codes needs the cause. Each
process of a rank keeps its own record. torchrun restarts ranks when the members of the gang change, and the record of a
rank's earlier process must not affect the result.
"""

import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from holdfast.runtime.exits import code_of
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import ExitCode
from holdfast.telemetry import emit
from holdfast.telemetry.events import RankEnded

FOLDER_VARIABLE = "HOLDFAST_RANK_EXITS"  # the folder of the ranks' records, on their node
FILE_VARIABLE = "HOLDFAST_EXIT_REPORT"  # read by the process that started torchrun; must exist already
_LEFT = ".left"  # suffix of the record of a rank that was running when another one died


class RankExit(BaseModel, frozen=True):
    """One process of a rank, and how it ended."""

    rank: int
    local_rank: int
    pid: int
    node: str
    attempt: int | None = None  # of the gang that it formed; None before
    began: float  # unix seconds
    ended: float | None = None  # unix seconds; None while it runs, and if it was killed
    code: int | None = None
    blames_node: bool = False  # whether the rank found that its own node is the cause


class NodeExit(BaseModel, frozen=True):
    """How the ranks of one node ended, as the launcher receives it."""

    code: int  # the root cause
    node: str
    blames_node: bool = False
    detail: str = Field("", max_length=1000)  # what no rank could report
    reclaimed: bool = False  # by its cloud, with a notice
    ranks: tuple[RankExit, ...] = ()

    @property
    def cause(self) -> RankExit | None:
        """The rank that explains the node's code: one with this code, else one that was killed without a record."""
        matching = [rank for rank in self.ranks if rank.code == self.code]
        return next(iter([*matching, *(rank for rank in self.ranks if rank.code is None)]), None)


class LaunchExit(BaseModel, frozen=True):
    """How a launch ended, as its launcher stores it for the next launch."""

    code: int | None = None
    detail: str = ""
    blamed_nodes: tuple[str, ...] = ()
    ended: FiniteFloat | None = None  # unix seconds
    ran_out: bool = False  # of memory, and `next_plan` is the planner's proposal
    next_plan: dict[str, Any] | None = None  # None after running out of memory: no layout needs less


class RankRecord:
    """This process's record, kept from start to end in the folder that torchrun reads."""

    def __init__(self) -> None:
        self._exit = RankExit(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))),
            pid=os.getpid(),
            node=socket.gethostname(),
            began=time.time(),
        )
        self._write()

    def formed(self, attempt: int) -> None:
        """Record that the gang has formed, as that attempt. From now on, a process that leaves no code was killed."""
        self._exit = self._exit.model_copy(update={"attempt": attempt})
        self._write()

    def ended(self, code: int, blames_node: bool = False) -> None:
        """Record that this process exits with `code`."""
        update = {"code": int(code), "ended": time.time(), "blames_node": blames_node}
        self._exit = self._exit.model_copy(update=update)
        self._write()

    def exit(self, code: int, blames_node: bool = False) -> NoReturn:
        """Record that this process exits with `code`, and exit."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.ended(code, blames_node)
        os._exit(code)  # process groups with a lost peer can block the interpreter's normal exit

    def _write(self) -> None:
        if not (folder := os.environ.get(FOLDER_VARIABLE)):
            return
        path = Path(folder) / f"{self._exit.pid}.json"
        with suppress(OSError):  # a full disk must not change the code; torchrun mostly sees it as well
            path.with_suffix(".unfinished").write_text(self._exit.model_dump_json())
            path.with_suffix(".unfinished").rename(path)


@contextmanager
def reporting_end() -> Iterator[None]:
    """Report how this rank ends: on rank 0, and on a rank that is a cause rather than a consequence."""
    rank, code, reason = int(os.environ.get("RANK", "0")), ExitCode.OK, ""
    try:
        yield
    except BaseException as error:
        code, reason = code_of(error), str(error) or type(error).__name__
        raise
    finally:
        if rank == 0 or code not in (ExitCode.OK, ExitCode.LOST_PEER, ExitCode.TERMINATED, ExitCode.PREEMPTED):
            emit(RankEnded(rank=rank, code=code, host=socket.gethostname(), reason=reason))


def mark_as_left(pid: int) -> None:
    """Mark that another rank died before process `pid` ended. If that process records no code, it lost its peer."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):
            (Path(folder) / f"{pid}{_LEFT}").touch()


def read_ranks(folder: Path) -> list[RankExit]:
    """The last process of each rank of this node, from the records in `folder`."""
    last: dict[int, RankExit] = {}
    for path in folder.glob("*.json"):
        record = RankExit.model_validate_json(path.read_text())
        if record.code is None and path.with_suffix(_LEFT).exists():
            record = record.model_copy(update={"code": int(ExitCode.LOST_PEER)})
        if record.local_rank not in last or last[record.local_rank].began < record.began:
            last[record.local_rank] = record
    return [last[rank] for rank in sorted(last)]


def node_exit_of(ranks: Sequence[RankExit], codes: Iterable[int], detail: str = "", reclaimed: str = "") -> NodeExit:
    """The node's exit report, from the ranks' records and further `codes`. `reclaimed` is the text of the cloud's
    reclaim notice, empty without one."""
    code = root_cause([*codes, *(rank.code for rank in ranks if rank.code is not None)])
    blamed = any(rank.blames_node and rank.code == code for rank in ranks)
    node = socket.gethostname()
    return NodeExit(
        code=code,
        node=node,
        blames_node=blamed,
        detail=redact(" ".join((detail or reclaimed).split()))[:1000],
        reclaimed=bool(reclaimed),
        ranks=tuple(ranks),
    )


def write_exit_report(ending: NodeExit) -> None:
    """Write the exit report to the file that HOLDFAST_EXIT_REPORT names, if it exists. Ignores OSError."""
    path = os.environ.get(FILE_VARIABLE)
    if path and Path(path).exists():
        with suppress(OSError):
            Path(path).write_text(ending.model_dump_json())


def parse_exit_report(text: str) -> NodeExit | None:
    """The exit report that a node left; None if the text is torn or something else."""
    try:
        return NodeExit.model_validate_json(text)
    except ValidationError:
        return None


def codes_of_nodes(status: int, endings: Sequence[NodeExit | None]) -> list[int]:
    """The code of each node of a launch whose processes ended together with `status`. It is the code of the node's
    report, or that of a lost node. A node without a report was lost, or the process that started its processes was;
    neither knows these codes."""
    lost = max(status, ExitCode.KILLED) if status != ExitCode.OK else ExitCode.OK
    return [int(lost) if ending is None else ending.code for ending in endings]


def as_exit_code(status: int) -> int:
    """An exit code as a shell reports it, from Python's form (negative for a signal)."""
    return 128 - status if status < 0 else status


def root_cause(codes: Iterable[int]) -> int:
    """The code that explains the rest: a permanent code first, then one that is not a consequence of another rank's
    end."""
    failures = [code for code in codes if code != ExitCode.OK]
    if not failures:
        return ExitCode.OK
    consequences = (ExitCode.LOST_PEER, ExitCode.TERMINATED)
    return min(failures, key=lambda code: (code >= 128, code in consequences, code))
