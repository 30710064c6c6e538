"""A process that a warm server forks equals a spawned one, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.launch.processes import WarmServer
from tests.faults.nodes import PATIENCE

CHILD = "tests.launch.child"


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    warm_server = WarmServer.spawn([CHILD])
    yield warm_server
    warm_server.close()


def ask(server: WarmServer, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the output of a child that was forked with `arguments`."""
    reading, writing = os.pipe()
    process = server.start(CHILD, arguments, {**os.environ, **environment}, writing, writing)
    os.close(writing)
    with os.fdopen(reading) as stream:
        output = stream.read()
    return process.wait(PATIENCE), output


@pytest.mark.slow
def test_a_forked_process_has_a_separate_environment_session_title_and_folder(
    server: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = ask(server, "say", RANK="7")
    state = json.loads(output)
    assert code == 0
    assert state == {
        "environment": {**os.environ, "RANK": "7"}, "session": True, "folder": str(tmp_path), "title": CHILD,
    }  # fmt: skip


def test_others_see_its_command_and_what_its_environment_adds(server: WarmServer) -> None:
    process = server.start(CHILD, ["wait"], {**os.environ, "RANK": "7"})
    child_process = psutil.Process(process.pid)
    while "wait" not in child_process.cmdline():
        assert child_process.is_running()
    assert child_process.environ()["RANK"] == "7"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_forked_process_ends_like_a_spawned_one(server: WarmServer) -> None:
    assert ask(server, "leave", "204") == (204, "")
    code, output = ask(server, "fail")
    assert code == 1
    assert output.endswith("RuntimeError: a bug\n")
    process = server.start(CHILD, ["wait"], os.environ)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM


def test_several_threads_that_wait_for_it_all_learn_how_it_ended(server: WarmServer) -> None:
    """A launcher waits for its gang in one thread, and stops it from another."""
    process = server.start(CHILD, ["wait"], os.environ)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait(PATIENCE)), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(PATIENCE)
    assert codes == [-signal.SIGTERM] * len(threads)


def test_the_process_group_exists_as_soon_as_its_id_is_known(server: WarmServer) -> None:
    """torchrun ends the other ranks this way when one fails, maybe before the last of them has done anything."""
    for _ in range(40):
        process = server.start(CHILD, ["wait"], os.environ)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM


def test_a_forked_process_handles_a_signal_as_soon_as_its_pid_is_known(server: WarmServer) -> None:
    processes = [server.start(CHILD, ["wait"], os.environ) for _ in range(3)]
    for _ in range(40):
        processes.append(server.start(CHILD, ["wait"], os.environ))
        processes[-1].send_signal(signal.SIGTERM)
    for process in processes[:3]:
        process.send_signal(signal.SIGTERM)
    assert {process.wait(PATIENCE) for process in processes} == {-signal.SIGTERM}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_computes_the_same_bits_as_a_spawned_one(threads: int, server: WarmServer) -> None:
    environment = {"OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(
        [sys.executable, "-m", CHILD, "sums", str(threads)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second = (ask(server, "sums", str(threads), **environment) for _ in range(2))
    assert first == second == (0, result.stdout)


def test_a_forked_process_does_not_garbage_collect_imported_objects(server: WarmServer) -> None:
    assert ask(server, "collect") == (0, "[true, true]\n")


MAKER = f"""
import os, sys
from holdfast.launch.processes import WarmServer
server = WarmServer.fork([{CHILD!r}])
server.start({CHILD!r}, ["wait"], os.environ).wait()
"""


@pytest.mark.slow
def test_a_forked_process_dies_with_the_creator_of_its_server() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        child = psutil.Process(int(maker.stdout.readline().split()[0]))
        maker.kill()
        child.wait(PATIENCE)


@pytest.mark.slow
def test_a_killed_server_ends_its_processes_and_refuses_new_ones() -> None:
    server = WarmServer.spawn([CHILD])
    process = server.start(CHILD, ["wait"], os.environ)
    os.kill(server.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    with pytest.raises(BrokenPipeError):
        server.start(CHILD, ["wait"], os.environ)


def test_a_server_with_threads_refuses_to_fork(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    code = "from holdfast.launch.processes import WarmServer\nWarmServer.fork(['threaded'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "2 threads run after the import of threaded: nothing can be forked" in result.stderr


LATE = """
import sys
import holdfast.rank.worker
from holdfast.rank.randomness import make_deterministic
before = set(sys.modules)
make_deterministic("exact", 1)
import holdfast.engines.torch.engine
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_the_server_imports_the_torch_modules_of_ranks_before_it_forks() -> None:
    result = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
