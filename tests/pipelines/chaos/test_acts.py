"""Effects of some faults on a process: its connections end, its clock changes."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.chaos import disk
from holdfast.pipelines.chaos.disk import Disk
from holdfast.pipelines.chaos.fault_run import Planned, Run
from holdfast.pipelines.chaos.faults import FAULTS, LIMIT_SECONDS, Clock, Scene, _unlimitable, cut, refused
from holdfast.pipelines.chaos.processes import PIPELINE
from holdfast.telemetry.channel import line_of
from holdfast.telemetry.events import Progress


@contextmanager
def child(code: str, *, on: Disk | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", f"import sys\n{code}"]
    with subprocess.Popen(
        command if on is None else on.inside(command),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
    ) as process:  # fmt: skip
        yield process


def ask(process: subprocess.Popen[str], word: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


CONNECTS = """
import socket
for port in sys.stdin:
    one = socket.create_connection(("127.0.0.1", int(port)), 60)
    print("connected", flush=True)
    print(len(one.recv(1)), flush=True)
"""


@pytest.mark.skipif(bool(refused()), reason=refused())
def test_only_what_connects_a_process_to_its_peers_is_cut_and_both_ends_see_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, child(CONNECTS) as peer, child("input()") as stranger:
        server.settimeout(60)
        assert ask(peer, str(server.getsockname()[1])) == "connected"
        connection, _ = server.accept()
        with connection:
            process, this_process = psutil.Process(peer.pid), psutil.Process()
            assert cut(process, [psutil.Process(stranger.pid)]) == 0
            assert cut(process, [this_process]) == 1
            connection.settimeout(60)
            assert connection.recv(1) == b""
            assert peer.stdout is not None
            assert peer.stdout.readline() == "0\n"


def test_a_clock_jumps_for_processes_that_run_and_only_for_them(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    program = "import time\nfor _ in sys.stdin: print(time.time(), time.time_ns(), flush=True)"
    with child(program, on=None, **clock.environment({})) as process:
        for offset in (0.0, 3600.0, -60.0, 0.0):
            clock.jump(offset)
            before = time.time()
            seconds, nanoseconds = ask(process).split()
            assert before + offset <= float(seconds) <= time.time() + offset
            assert abs(int(nanoseconds) / 1e9 - float(seconds)) < 60


WRITES = """
import errno, os
for name in sys.stdin:
    try:
        file = os.open(name.strip(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b"x" * 8192)
        print(os.getcwd(), flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


@pytest.fixture(params=["as root", "as a user"])
def rights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, user namespaces are tested too."""
    if request.param == "as root" and disk._tried() != ((), ""):
        pytest.skip("not root")
    if request.param == "as a user":
        reply, why = disk._keeper(disk.OWN_USERS, Path(os.devnull).parent / "shm").communicate()
        if reply != "there\n":
            pytest.skip(f"users have no namespaces here: {why}")
        monkeypatch.setattr(disk, "_tried", lambda: (disk.OWN_USERS, ""))


@pytest.mark.usefixtures("rights")
def test_a_full_disk_affects_only_processes_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    with Disk(folder) as own, child(WRITES, on=own) as process:
        assert ask(process, str(folder / "one")) == str(Path.cwd())
        assert (own.seen / "one").read_bytes() == b"x" * 8192
        assert psutil.Process(process.pid).ppid() == os.getpid()
        with own.full():
            assert ask(process, str(folder / "two")) == "ENOSPC"
            assert ask(process, str(folder / "one")) == "ENOSPC"
            assert ask(process, str(tmp_path / "neighbor")) == str(Path.cwd())
            (folder / "outside").write_bytes(b"x" * 8192)
        assert ask(process, str(folder / "two")) == str(Path.cwd())
        assert not (folder / "two").exists()
        assert str(folder) not in Path("/proc/mounts").read_text()
        (own.seen / "logs").mkdir()
        (own.seen / "logs" / "run.log").write_text("what happened")
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert {path.name for path in folder.iterdir()} == {"outside", "logs"}
    assert (folder / "logs" / "run.log").read_text() == "what happened"


HAS_A_DISK = """
from pathlib import Path
from holdfast.pipelines.chaos.disk import Disk
with Disk(Path(sys.argv[1])) as own:
    print(own._keeper.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(bool(disk.refused()), reason=disk.refused())
def test_a_fault_disk_is_removed_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = HAS_A_DISK.replace("sys.argv[1]", repr(str(tmp_path / "home")))
    with child(code) as owner:
        assert owner.stdout is not None
        keeper = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    _, survivors = psutil.wait_procs([keeper], timeout=300)
    assert not survivors


def test_a_machine_without_mount_rights_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "unshare and nsenter and mount of util-linux" in disk._tried.__wrapped__()[1]
    monkeypatch.undo()
    monkeypatch.setattr(disk, "KEEPER", "echo 'mount: permission denied' >&2; exit 32")
    command, why = disk._tried.__wrapped__()
    assert command == () and "takes root" in why and "permission denied" in why


RANK = """
import subprocess
says = "import time; print('there', flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", says, "holdfast.rank.worker"], env={"RANK": "0"})
"""


@pytest.mark.skipif(bool(_unlimitable()), reason=_unlimitable())
def test_a_rank_that_needs_no_memory_gets_it_back_before_the_next_fault_is_due(tmp_path: Path) -> None:
    with child(RANK) as command:
        assert ask(command) == "there"
        (rank,) = psutil.Process(command.pid).children()
        before, limits = rank.rlimit(psutil.RLIMIT_AS), []

        def late() -> bool:
            limits.append(rank.rlimit(psutil.RLIMIT_AS)[0])
            return len(limits) == 2

        scene = Scene(psutil.Process(command.pid), None, Clock(tmp_path), None, random.Random(1), late)
        start = time.monotonic()
        assert "and needs none" in FAULTS["memory-limit"].act(scene)
        assert time.monotonic() - start < LIMIT_SECONDS
        assert limits == [0, 0]
        assert rank.rlimit(psutil.RLIMIT_AS) == before
        rank.kill()


# A step of two processes that have a long time to save, and its parent.
TRAINS = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, line = map(Path, sys.argv[1:])
(folder / str(os.getpid())).touch()
if os.fork() == 0:
    (folder / str(os.getpid())).touch()
    with open(os.environ["HOLDFAST_EVENTS"], "ab") as events:
        events.write(line.read_bytes())
signal.pause()
"""
RUNS = """
import os, subprocess, sys
from pathlib import Path
(Path(sys.argv[1]) / str(os.getpid())).touch()
subprocess.run(sys.argv[4:], check=False)
"""


def test_a_storm_that_is_interrupted_right_after_the_pipeline_was_killed_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "processes").mkdir()
    (line := tmp_path / "line").write_bytes(
        line_of(Progress(writer="w", number=1, time=1.0, step=1, steps=9, tokens_per_second=1.0, seconds_left=1.0))
    )
    step = [sys.executable, "-c", TRAINS, str(folder), str(line)]
    pipeline = [sys.executable, "-c", RUNS, str(folder), "-m", PIPELINE, *step]
    command = [sys.executable, "-c", RUNS, str(folder), "of", "it", *pipeline]
    fault = FAULTS["pipeline-killed"]

    def interrupted(scene: Scene) -> str:
        assert fault.act(scene)
        raise KeyboardInterrupt

    monkeypatch.setitem(FAULTS, "pipeline-killed", replace(fault, act=interrupted))
    run = Run(command, tmp_path / "home", {}, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        run.go([Planned("pipeline-killed", 1, 9)], None, 1, lambda _: None)
    started = [int(path.name) for path in folder.iterdir()]
    assert len(started) == 4
    _, survivors = psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=0)
    for process in survivors:
        process.kill()
    assert not survivors
