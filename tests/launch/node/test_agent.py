"""Complete copies in shared memory are committed, whichever process dies; and a dead process leaves nothing."""

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.launch.node.agent import AgentKeeper
from holdfast.launch.processes import WarmProcess, WarmServer
from tests.faults.nodes import PATIENCE
from tests.launch.node.agent_of_files import content

MODULE = "tests.launch.node.agent_of_files"


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    warm_server = WarmServer.spawn([MODULE])
    yield warm_server
    warm_server.close()


class Node:
    """A node with an agent and ranks."""

    def __init__(self, server: WarmServer, folder: Path, silence: float = 60.0) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self._server, self._folder, self.ranks = server, folder, dict[int, WarmProcess]()
        self.keeper = AgentKeeper(server, folder, MODULE, silence)

    def rank(self, number: int, world: int, *steps: int) -> WarmProcess:
        """Start a rank that saves at these steps."""
        descriptor = os.open(self._folder / f"rank-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        arguments = [str(self._folder / "checkpoint-agent"), str(self.store), str(number), str(world), *map(str, steps)]
        self.ranks[number] = self._server.start(MODULE, arguments, os.environ, descriptor, descriptor)
        os.close(descriptor)
        return self.ranks[number]

    def lines_of(self, number: int) -> list[str]:
        """The lines that a rank has printed."""
        path = self._folder / f"rank-{number}"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, number: int, line: str) -> None:
        """Wait until a rank has printed a line."""
        wait_until(lambda: line in self.lines_of(number), lambda: f"no {line!r} in {self.lines_of(number)}")

    def end(self, seconds: float = 60.0) -> None:
        """End the ranks, and then the agent after its work."""
        for process in self.ranks.values():
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
        self.keeper.drain(seconds)

    def part(self, number: int, step: int) -> bytes:
        """The content of a rank's part of a step."""
        return (self.store / f"part-{number}-{step}").read_bytes()


@pytest.fixture
def node(server: WarmServer, tmp_path: Path) -> Iterator[Node]:
    new_node = Node(server, tmp_path)
    yield new_node
    (new_node.store / "hold").unlink(missing_ok=True)
    new_node.end(1.0)


def wait_until(condition: Callable[[], bool], why: Callable[[], str] = lambda: "it never came") -> None:
    """Wait for something that other processes cause."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)


def bits(number: int, step: int) -> bytes:
    return content(number, step).numpy().tobytes()


def test_copies_of_all_ranks_are_committed_in_order_and_each_rank_gets_its_results(node: Node) -> None:
    for number in range(2):
        node.rank(number, 2, 3, 6)
    node.wait_for(0, "6 done 65536")
    node.wait_for(1, "6 done None")
    for text in ("durable None", "done 65536"):  # a step may be durable before the one before it is committed
        assert [line for line in node.lines_of(0) if line.endswith(text)] == [f"3 {text}", f"6 {text}"]
    for step in (3, 6):
        assert node.lines_of(0).index(f"{step} durable None") < node.lines_of(0).index(f"{step} done 65536")
    assert [line for line in node.lines_of(1) if line != "handed over"] == ["3 done None", "6 done None"]
    for number in range(2):
        assert [node.part(number, step) for step in (3, 6)] == [bits(number, step) for step in (3, 6)]
    assert (node.store / "step-6").read_text() == "{'step': 6} {'a': 'b'}"
    wait_until((node.store / "collected-6").exists)


def test_a_failed_save_is_reported_with_its_message_and_later_saves_succeed(node: Node) -> None:
    (node.store / "refuse-3").touch()
    node.rank(0, 1, 3, 6)
    node.wait_for(0, "6 done 65536")
    assert "3 failed the folder is away" in node.lines_of(0)
    assert not (node.store / "step-3").exists()


def test_ranks_that_are_killed_right_after_their_copies_take_none_with_them(node: Node) -> None:
    (node.store / "hold").touch()
    for number in range(2):
        node.rank(number, 2, 3)
        wait_until((node.store / f"begun-{number}-3").exists)
    for process in node.ranks.values():
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    (node.store / "hold").unlink()
    node.end()
    assert (node.store / "step-3").exists()
    assert [node.part(number, 3) for number in range(2)] == [bits(number, 3) for number in range(2)]


def test_a_save_fails_when_a_rank_dies_before_its_copy_is_made(node: Node) -> None:
    node.rank(1, 2, 1)
    node.wait_for(1, "1 done None")  # the agent knows it
    node.rank(0, 2, 3)
    node.wait_for(0, "3 durable None")
    node.ranks[1].send_signal(signal.SIGKILL)
    node.wait_for(0, "3 failed step 3: rank 1 ended before its state was copied")
    node.end()
    assert not (node.store / "step-3").exists()


def test_a_save_after_the_death_of_another_rank_fails_immediately(node: Node) -> None:
    node.rank(1, 2, 3)
    node.wait_for(1, "3 done None")
    node.ranks[1].send_signal(signal.SIGKILL)
    node.ranks[1].wait(PATIENCE)
    node.rank(0, 2, 3, 6)
    node.wait_for(0, "6 failed step 6: rank 1 ended before its state was copied")
    assert "3 done 65536" in node.lines_of(0)


def test_an_agent_that_is_killed_in_mid_save_is_followed_by_one_that_ends_it(node: Node) -> None:
    (node.store / "hold").touch()
    for number in range(2):
        node.rank(number, 2, 3, 6)
        node.wait_for(number, "handed over")
        wait_until((node.store / f"begun-{number}-3").exists)
    killed = node.keeper.pid
    os.kill(killed, signal.SIGKILL)
    (node.store / "hold").unlink()
    node.wait_for(0, "6 done 65536")
    node.wait_for(1, "6 done None")
    wait_until(lambda: node.keeper.pid != killed)
    assert [node.part(number, 6) for number in range(2)] == [bits(number, 6) for number in range(2)]
    assert [line for line in node.lines_of(0) if line.startswith("3 done")] == ["3 done 65536"]


def test_the_next_agent_commits_a_durable_save_without_its_copy(node: Node) -> None:
    node.rank(0, 2, 3)
    node.wait_for(0, "3 durable None")
    os.kill(node.keeper.pid, signal.SIGKILL)
    (node.store / "begun-0-3").unlink()
    node.rank(1, 2, 3)
    node.wait_for(0, "3 done 65536")
    assert not (node.store / "begun-0-3").exists()


def test_an_agent_that_is_suspended_and_resumed_loses_nothing(node: Node) -> None:
    (node.store / "hold").touch()
    node.rank(0, 1, 3, 6)
    node.wait_for(0, "handed over")
    os.kill(node.keeper.pid, signal.SIGSTOP)
    (node.store / "hold").unlink()
    os.kill(node.keeper.pid, signal.SIGCONT)
    node.wait_for(0, "6 done 65536")
    assert node.part(0, 6) == bits(0, 6)


def test_a_silent_agent_is_replaced(server: WarmServer, tmp_path: Path) -> None:
    node = Node(server, tmp_path, silence=2.0)
    (node.store / "hold").touch()
    node.rank(0, 1, 3)
    node.wait_for(0, "handed over")
    os.kill(pid := node.keeper.pid, signal.SIGSTOP)
    (node.store / "hold").unlink()
    node.wait_for(0, "3 done 65536")
    wait_until(lambda: not psutil.pid_exists(pid))  # its parent reaps it soon
    node.end()


def test_a_save_not_done_in_time_is_logged_and_abandoned(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    (node.store / "hold").touch()
    node.rank(0, 1, 3)
    wait_until((node.store / "begun-0-3").exists)
    node.end(0.2)
    assert "not saved within 0.2 s: step 3 of rank 0: its part is being written" in caplog.text
    wait_until(lambda: not psutil.pid_exists(node.keeper.pid))  # killed, and soon reaped by its parent


def test_a_reclaimed_node_stops_waiting_for_its_saves(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    (node.store / "hold").touch()
    process = node.rank(0, 1, 3)
    wait_until((node.store / "begun-0-3").exists)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    by_when = iter([math.inf])
    node.keeper.drain(3600.0, lambda: next(by_when, 0.0))
    assert "this node has to go: what was in flight is saved by the next attempt" in caplog.text
    wait_until(lambda: not psutil.pid_exists(node.keeper.pid))


def test_an_invalid_message_restarts_the_agent_and_the_saves_of_the_ranks_succeed(node: Node, tmp_path: Path) -> None:
    (node.store / "hold").touch()
    node.rank(0, 1, 3)
    node.wait_for(0, "handed over")
    former = node.keeper.pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(tmp_path / "checkpoint-agent"))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: node.keeper.pid != former)
    (node.store / "hold").unlink()
    node.wait_for(0, "3 done 65536")


@pytest.mark.slow
def test_the_agent_and_the_ranks_die_with_their_fork_server(tmp_path: Path) -> None:
    server = WarmServer.spawn([MODULE])
    node = Node(server, tmp_path)
    node.rank(0, 2, 3)
    node.wait_for(0, "3 durable None")
    agent, rank = psutil.Process(node.keeper.pid), psutil.Process(node.ranks[0].pid)
    assert "/memfd:checkpoint" in {
        mapping.path for mapping in agent.memory_maps()
    }  # anonymous memory goes with its processes
    node.keeper._ending = True  # its keeper is gone too
    os.kill(server.pid, signal.SIGKILL)
    assert psutil.wait_procs([agent, rank], timeout=PATIENCE)[1] == []
