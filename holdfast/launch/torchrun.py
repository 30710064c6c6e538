"""torchrun with meaningful exit codes: `python -m holdfast.launch.torchrun [flags] -m module …`.

The ranks run the module's `main()`, forked from a process that has imported it. Importing the module must have no other
effect. The wrapper takes torchrun's flags and PET_ variables, so a PyTorchJob configures it like torchrun.

- HOLDFAST_EXIT_REPORT names a file: the node's exit report is written there as a typed record.
- The ranks' arguments name a run: the ranks' output goes to its store, and an agent makes their checkpoints durable.
- HOLDFAST_SPOT names a cloud: when the cloud announces that it reclaims this machine, the ranks save and leave.
"""

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
from holdfast.launch.exits import (
    FOLDER_VARIABLE,
    as_exit_code,
    node_exit_of,
    read_ranks,
    write_exit_report,
)
from holdfast.launch.interface import LEAVE_MARGIN, NODE_RANK_VARIABLE
from holdfast.launch.node import agent
from holdfast.launch.node.agent import AgentKeeper
from holdfast.launch.node.output import CLOSE_SECONDS, TAKE_SECONDS, NodeEvents, Place, RankOutput
from holdfast.launch.node.spot_notice import SpotNoticeWatch
from holdfast.launch.node.watchdog import Watchdog
from holdfast.launch.processes import WarmServer, die_with_parent, lead_children
from holdfast.runtime import sealing
from holdfast.runtime.signals import prompt_signals
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

# Seconds from a signal until this process gives up on the checkpoint agent. The ranks' last lines and the exit of this
# process still fit before SIGKILL.
_DRAIN_AFTER_SIGNAL = LEAVE_MARGIN - TAKE_SECONDS - CLOSE_SECONDS - 2.0


def main(arguments: list[str] | None = None) -> int:
    """Run the gang's processes on this node, as the command line says. Returns the code that explains how they
    ended."""
    for number in (signal.SIGTERM, signal.SIGINT):  # PID 1 of a container has no default handler that ends it
        signal.signal(number, _leave)
    die_with_parent()
    lead_children()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    options = parse_args(sys.argv[1:] if arguments is None else arguments)
    key = os.environ.pop(sealing.VARIABLE, "")  # before any process starts that would inherit it
    server = _warm_server(options.training_script) if options.module and not options.no_python else None
    place = Place.of(options.training_script_args)
    with (
        prompt_signals(),
        temporary_folder() as folder,
        NodeEvents(place) as events,
        SpotNoticeWatch(events) as reclaim,
    ):
        os.environ[FOLDER_VARIABLE] = folder
        output = RankOutput(place, Path(folder))
        watchdog = Watchdog(events, Path(folder), output.add, launch_key=key)
        keeper = _agent(server, Path(folder)) if place is not None else None
        _start_ranks_with(server, options.training_script, output, watchdog)
        _choose_meeting(options, Path(folder), key)
        codes, detail, codes_by_pid = list[int](), "", dict[int, int]()
        leaving = _Leaving()
        end = _End(Path(folder), watchdog, keeper, output, reclaim, leaving)
        _choose_agent(options, folder)
        try:
            try:
                _exit_if_signaled()
                run(options)
            finally:  # nothing is left to stop, and a signal must not replace the reason
                leaving.listen()
        except ChildFailedError as error:
            codes_by_pid = {failure.pid: as_exit_code(failure.exitcode) for failure in error.failures.values()}
            codes = list(codes_by_pid.values())
        # A signal stopped torchrun. The ranks' exits say more, and also which ranks were dead before it.
        except SignalException as error:
            leaving.set_deadline()
            ranks = read_ranks(Path(folder))
            codes = [ExitCode.KILLED for rank in ranks if rank.attempt is not None and rank.code is None]
            if not codes and all(rank.code is None for rank in ranks):
                codes = [128 + int(error.sigval)]
        except (RendezvousError, DistError) as error:  # another node failed, or the one that hosts the rendezvous
            codes, detail = end.apart(error)
        code = end.come(codes, detail)
        output.close({} if end.hung else codes_by_pid)
    for number in _STOP_SIGNALS:  # the interpreter restores default handlers at exit
        signal.signal(number, signal.SIG_IGN)
    return code


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that tell torchrun to stop
_early_signals: list[int] = []  # signals that came before any rank was started


def _leave(number: int, _: object) -> None:
    """Handle a signal before any rank has started: there is nothing to save."""
    _early_signals.append(number)
    sys.exit(128 + number)


def _exit_if_signaled() -> None:
    """Exit if a signal came before the ranks. An exception from a signal handler is lost while a destructor runs."""
    if _early_signals:
        sys.exit(128 + _early_signals[0])


class _Leaving:
    """Whether this node has to stop, and the agent's deadline. The ranks have their grace period before it."""

    deadline = math.inf  # monotonic seconds

    def listen(self) -> None:
        """From now on, a signal only sets the deadline."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self.set_deadline)

    def set_deadline(self, *_: object) -> None:
        """Set the deadline: this node is being stopped. Takes no lock, because it runs as a signal handler."""
        self.deadline = min(self.deadline, time.monotonic() + _DRAIN_AFTER_SIGNAL)


@dataclass
class _End:
    """The end of this node's ranks. It waits until the agent has committed what the ranks handed over."""

    folder: Path
    watchdog: Watchdog
    keeper: AgentKeeper | None
    output: RankOutput
    reclaim: SpotNoticeWatch
    leaving: _Leaving
    hung: bool = False  # ranks were ended because of a hang, so torchrun's result explains nothing
    trained_elsewhere: bool = False  # this node stood by at the end: ranks that it had before explain nothing

    def apart(self, error: Exception) -> tuple[list[int], str]:
        """The exit code and the reason when the nodes did not meet or lost each other."""
        ranks, name = read_ranks(self.folder), type(error).__name__
        self.trained_elsewhere = name == "TrainedError"
        if self.trained_elsewhere or (ranks and all(rank.code == ExitCode.OK for rank in ranks)):
            return [], ""  # the other nodes left because the run is trained
        met = bool(ranks) or name == "NoSlotError"
        event = "lost each other" if met else "did not meet within cluster.nodes.rendezvous_seconds"
        detail = f"the nodes {event}: {name} {error}"
        log.error("%s", detail)
        return [ExitCode.LOST_PEER if met else ExitCode.RENDEZVOUS_TIMEOUT], detail

    def come(self, codes: Sequence[int], detail: str) -> int:
        """Write the exit report after the ranks have ended. Returns the code that their records and `codes` explain."""
        if hang := self.watchdog.close():
            has_codes = any(rank.code is not None for rank in read_ranks(self.folder))
            codes, detail, self.hung = (
                [] if has_codes else [ExitCode.LOST_PEER],
                hang,
                True,
            )  # a full disk keeps no record
        ranks = [] if self.trained_elsewhere else read_ranks(self.folder)
        ending = node_exit_of(ranks, codes, detail, reclaimed=self.reclaim.words)
        write_exit_report(ending)
        if self.keeper is not None:
            self.keeper.drain(latest=lambda: self.leaving.deadline)
        self.output.take_rest()
        return ending.code


def _choose_agent(given: Namespace, folder: str) -> None:
    """Install the agent classes that torchrun uses to follow its ranks, and keep its logs in `folder` unless set.

    With a variable number of nodes (MIN:MAX) or with spares, the remaining nodes continue. They meet at the first node.
    torch would let any node host the rendezvous that finds its own address behind the name, and all nodes that share a
    machine do.
    """
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
    """Install the rendezvous: without an open listener on one node, and secured by the launch's key on several nodes.
    Exits with USAGE if there are several nodes and no key."""
    from torch.distributed.run import parse_min_max_nnodes

    from holdfast.launch.node import rendezvous

    alone = parse_min_max_nnodes(given.nnodes)[1] == 1 and "spares=" not in given.rdzv_conf
    if alone:
        # Only this machine may connect to the ports that ranks of one machine open.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif len(key) < sealing.MIN_CHARACTERS:
        log.error(
            "%s is not set, or has fewer than %d characters: the nodes of a launch know each other by it. Give all of "
            "them the same random value, such as that of `openssl rand -hex 32`",
            sealing.VARIABLE,
            sealing.MIN_CHARACTERS,
        )
        sys.exit(ExitCode.USAGE)
    else:
        # The id is secret: `ps` and the description of a pod do not show it.
        given.rdzv_id = f"{given.rdzv_id}-{sealing.derive_key(key, 'rendezvous id')[:32]}"
        os.environ[sealing.NEAR_VARIABLE] = sealing.derive_key(key, "near copies")
    rendezvous.install(folder, key, alone=alone)


def _warm_server(module: str) -> WarmServer | None:
    """The server that forks the ranks, now and after each failure, so that no rank starts an interpreter. Call it
    first: later code starts threads. None if there is more than one thread already."""
    try:
        return WarmServer.fork([module, agent.MODULE])
    except RuntimeError as error:
        log.warning("every rank imports torch itself: %s", error)
        return None


def _agent(server: WarmServer | None, folder: Path) -> AgentKeeper | None:
    """The keeper of the checkpoint agent; None if the agent cannot start. Each rank then saves its own checkpoints."""
    try:
        keeper = AgentKeeper(server, folder)
    except (ValueError, OSError) as error:
        log.warning("every rank saves its checkpoints itself: %s", error)
        return None
    os.environ[VARIABLE] = str(keeper.path)  # for the ranks
    return keeper


def _start_ranks_with(server: WarmServer | None, module: str, output: RankOutput, watchdog: Watchdog) -> None:
    """Have torchrun start the ranks from `server`, `output` take what they print, and `watchdog` watch them."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
            reader, writer = output.pipe()
            stdout, stderr = (writer if stream is None else stream.fileno() for stream in (self._stdout, self._stderr))
            started: Any = None
            # numactl starts a rank that is bound to the cores of its accelerator.
            if server is not None and args[:4] == (sys.executable, "-u", "-m", module):
                try:
                    # A WarmProcess has all methods of Popen that are used here.
                    started = server.start(module, args[4:], env, stdout, stderr)
                except OSError as error:  # the server was killed, with the ranks it had started
                    log.warning("this rank imports torch itself: %s", error)
            started = started or subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
            os.close(writer)
            output.follow(reader, int(env["RANK"]), started.pid)
            watchdog.follow(env, started.pid)
            return cast("subprocess.Popen[Any]", started)

    api.get_subprocess_handler = Handler  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
