"""torchrun with an exit code that means something: `python -m holdfast.launch.torchrun [flags] -m module …`.

The ranks run the module's `main()`, forked from a process that has imported it: importing it must do nothing else.
Takes torchrun's own flags and PET_ variables, so a PyTorchJob configures it as it configures torchrun. Where
HOLDFAST_ENDING_FILE names a file, how this node ended goes there too, as a typed record; where the ranks' arguments
name a run, what they print goes to its store, and an agent makes their checkpoints durable. Where
HOLDFAST_SPOT names a cloud, a notice that it takes this machine back has the ranks save and leave.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from holdfast.checkpoint.agent.protocol import VARIABLE
from holdfast.launch.exit_report import (
    FOLDER_VARIABLE,
    RankExit,
    as_exit_code,
    node_exit_of,
    read_ranks,
    write_exit_report,
)
from holdfast.launch.interface import LEAVE_MARGIN, NODE_RANK_VARIABLE
from holdfast.launch.node import agent
from holdfast.launch.node.agent import AgentKeeper
from holdfast.launch.node.events import NodeEvents
from holdfast.launch.node.output import CLOSE_SECONDS, TAKE_SECONDS, Place, RankOutput
from holdfast.launch.node.spot_notice import SpotNoticeWatch
from holdfast.launch.node.watchdog import Watchdog
from holdfast.launch.parent_death import die_with_parent, lead_children
from holdfast.launch.warm import WarmServer
from holdfast.runtime import sealing
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

# From a signal until the checkpoint agent is given up, in seconds: the ranks' last lines, and what ends this process,
# still fit before SIGKILL.
_DRAIN_WHEN_TOLD = LEAVE_MARGIN - TAKE_SECONDS - CLOSE_SECONDS - 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run the gang's processes on this node, as the command line says; the code of the table that explains how they
    ended."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a container has no default that ends it
        signal.signal(number, _leave)
    die_with_parent()
    lead_children()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    given = parse_args(sys.argv[1:] if arguments is None else arguments)
    key = os.environ.pop(sealing.VARIABLE, "")  # before anything is started, which would inherit it
    server = _warm_server(given.training_script) if given.module and not given.no_python else None
    place = Place.of(given.training_script_args)
    with (
        temporary_folder() as folder,
        NodeEvents(place) as events,
        SpotNoticeWatch(events) as reclaim,
    ):
        os.environ[FOLDER_VARIABLE] = folder
        output = RankOutput(place, Path(folder))
        watchdog = Watchdog(events, Path(folder), output.add, launch_key=key)
        keeper = _agent(server, Path(folder)) if place is not None else None
        _start_ranks_with(server, given.training_script, output, watchdog)
        _choose_meeting(given, Path(folder), key)
        codes, detail, seen = list[int](), "", dict[int, int]()
        leaving = _Leaving()
        end = _End(Path(folder), watchdog, keeper, output, reclaim, leaving)
        _choose_agent(given, folder)
        try:
            try:
                _leave_if_told()
                run(given)
            finally:  # nothing is left to stop, and what follows says why: a signal must not replace it
                leaving.listen()
        except ChildFailedError as error:
            seen = {failure.pid: as_exit_code(failure.exitcode) for failure in error.failures.values()}
            codes = list(seen.values())
        except SignalException as error:  # told to stop: how the ranks left says more, and which were dead by then
            leaving.told()
            ranks = read_ranks(Path(folder))
            codes = [ExitCode.KILLED for rank in ranks if rank.attempt is not None and rank.code is None]
            if not codes and all(rank.code is None for rank in ranks):
                codes = [128 + int(error.sigval)]
        except (RendezvousError, DistError) as error:  # the other nodes, or the one that hosts the rendezvous
            codes, detail = _apart(error, read_ranks(Path(folder)))
        code = end.come(codes, detail)
        output.close({} if end.hung else seen)
    for number in _TOLD_BY:  # the interpreter's way out gives handlers back to the default
        signal.signal(number, signal.SIG_IGN)
    return code


_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # to torchrun, that it has to go
_told: list[int] = []  # signals that came before any rank was started


def _leave(number: int, _: object) -> None:
    """No rank has been started yet: there is nothing to save."""
    _told.append(number)
    sys.exit(128 + number)


def _leave_if_told() -> None:
    """What a handler raises is lost where a destructor is running."""
    if _told:
        sys.exit(128 + _told[0])


class _Leaving:
    """Whether this node has been told to go, and by when its agent must have ended. Ranks have their grace before."""

    deadline = math.inf  # monotonic seconds

    def listen(self) -> None:
        """From now on a signal only says so."""
        for number in _TOLD_BY:
            signal.signal(number, self.told)

    def told(self, *_: object) -> None:
        """Somebody ends this node. Takes no lock: it runs as the handler of a signal."""
        self.deadline = min(self.deadline, time.monotonic() + _DRAIN_WHEN_TOLD)


@dataclass
class _End:
    """The end of this node's ranks: it comes once what they handed over is committed."""

    folder: Path
    watchdog: Watchdog
    keeper: AgentKeeper | None
    output: RankOutput
    reclaim: SpotNoticeWatch
    leaving: _Leaving
    hung: bool = False  # the ranks were ended for a hang: what torchrun says of that explains nothing

    def come(self, codes: Sequence[int], detail: str) -> int:
        """The ranks have ended: the code that explains how, by their records and further `codes`."""
        if hang := self.watchdog.close():
            known = any(rank.code is not None for rank in read_ranks(self.folder))
            codes, detail, self.hung = [] if known else [ExitCode.LOST_PEER], hang, True  # a full disk keeps no record
        ending = node_exit_of(read_ranks(self.folder), codes, detail, reclaimed=self.reclaim.words)
        write_exit_report(ending)
        if self.keeper is not None:
            self.keeper.drain(latest=lambda: self.leaving.deadline)
        self.output.take_rest()
        return ending.code


def _choose_agent(given: Namespace, folder: str) -> None:
    """Have torchrun follow its ranks as ours do, and note in `folder` what nobody has asked it to keep. Where there may
    be more nodes or fewer (MIN:MAX), or spares, those that are left go on. They meet at the first one: torch would have
    any of them host that which finds its own address behind the name, as all do that share a machine."""
    from torch.distributed.run import parse_min_max_nnodes

    from holdfast.launch.node.fast_exit_agent import FastExitAgent

    FastExitAgent.install()
    if (given.redirects, given.tee) == ("0", "0"):
        given.log_dir = given.log_dir or folder
    fewest, most = parse_min_max_nnodes(given.nnodes)
    spares = "spares=" in given.rdzv_conf
    if spares:
        from holdfast.launch.node.spare_rendezvous import SpareRendezvousHandler

        SpareRendezvousHandler.install()
    if fewest < most or spares:
        from holdfast.launch.node.elastic_agent import ElasticNodeAgent

        ElasticNodeAgent.install()
        if number := os.environ.get(NODE_RANK_VARIABLE):
            given.rdzv_conf = f"{given.rdzv_conf},is_host={int(number == '0')}".lstrip(",")


def _choose_meeting(given: Namespace, folder: Path, key: str) -> None:
    """Have the nodes meet without an open listener where there is one, and by the launch's key where there are several.
    Ends with USAGE where several nodes have no key."""
    from torch.distributed.run import parse_min_max_nnodes

    from holdfast.launch.node import rendezvous

    alone = parse_min_max_nnodes(given.nnodes)[1] == 1 and "spares=" not in given.rdzv_conf
    if alone:
        # What ranks of one machine open is for this machine alone.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif len(key) < sealing.MIN_CHARACTERS:
        log.error(
            "%s is not set, or has fewer than %d characters: the nodes of a launch know each other by it. Give all of "
            "them the same random value, such as that of `openssl rand -hex 32`", sealing.VARIABLE,
            sealing.MIN_CHARACTERS,
        )  # fmt: skip
        sys.exit(ExitCode.USAGE)
    else:
        # A name that nobody reads in `ps` or in the description of a pod.
        given.rdzv_id = f"{given.rdzv_id}-{sealing.derive_key(key, 'rendezvous id')[:32]}"
        os.environ[sealing.NEAR_VARIABLE] = sealing.derive_key(key, "near copies")
    rendezvous.install(folder, key, alone=alone)


def _apart(error: Exception, ranks: Sequence[RankExit]) -> tuple[list[int], str]:
    """What it means that the nodes are not together (any more): a code, and why."""
    if type(error).__name__ == "TrainedError" or (ranks and all(rank.code == ExitCode.OK for rank in ranks)):
        return [], ""  # the others have left, because the run is trained
    met = bool(ranks) or type(error).__name__ == "NoSlotError"
    what = "lost each other" if met else "did not meet within cluster.nodes.rendezvous_seconds"
    detail = f"the nodes {what}: {type(error).__name__} {error}"
    log.error("%s", detail)
    return [ExitCode.LOST_PEER if met else ExitCode.RENDEZVOUS_TIMEOUT], detail


def _warm_server(module: str) -> WarmServer | None:
    """What forks the ranks, now and after each failure, instead of an interpreter that starts for each. Before anything
    else: what comes after starts threads."""
    try:
        return WarmServer.fork([module, agent.MODULE])
    except RuntimeError as error:
        log.warning("every rank imports torch itself: %s", error)
        return None


def _agent(server: WarmServer | None, folder: Path) -> AgentKeeper | None:
    """What makes the ranks' checkpoints durable beside them."""
    try:
        keeper = AgentKeeper(server, folder)
    except (ValueError, OSError) as error:
        log.warning("every rank saves its checkpoints itself: %s", error)
        return None
    os.environ[VARIABLE] = str(keeper.path)  # for the ranks
    return keeper


def _start_ranks_with(server: WarmServer | None, module: str, output: RankOutput, watchdog: Watchdog) -> None:
    """Have torchrun start the ranks from the server, what they print taken by `output`, and them watched."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
            reader, writer = output.pipe()
            stdout, stderr = (writer if one is None else one.fileno() for one in (self._stdout, self._stderr))
            started: Any = None
            # One that is bound to the cores of its accelerator is started by numactl.
            if server is not None and args[:4] == (sys.executable, "-u", "-m", module):
                try:
                    started = server.start(module, args[4:], env, stdout, stderr)  # all that is used of a Popen
                except OSError as error:  # the server was killed, with the ranks that it had started
                    log.warning("this rank imports torch itself: %s", error)
            started = started or subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
            os.close(writer)
            output.follow(reader, int(env["RANK"]), started.pid)
            watchdog.follow(env, started.pid)
            return cast("subprocess.Popen[Any]", started)

    api.get_subprocess_handler = Handler  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
