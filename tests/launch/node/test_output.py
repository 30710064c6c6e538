"""Output of real ranks under a real torchrun: passed on, and kept in the store, also when ranks are killed."""

import json
import os
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.launch import GangExit, Job, LocalLauncher, Supervisor
from holdfast.launch.node.output import Place, RankOutput
from holdfast.spec.cluster import Cluster, Restarts
from holdfast.store import Store, layout, open_store
from holdfast.telemetry.rank_logs import RankStream, rank_lines, rank_streams
from tests.faults.nodes import PATIENCE
from tests.launch.launched import launched
from tests.launch.worker import CLOSING

RUN = "0123456789abcdef"


def job(store: str, *deeds: str, launch: int = 1) -> Job:
    arguments = ["--run-id", RUN, "--launch", str(launch), "--store", store]
    deeds = tuple(f"{rank}:{action}" for rank, action in enumerate(deeds))
    command = ["-m", "tests.launch.worker", *arguments, *deeds]
    environment = {CLOSING: str(PATIENCE)}
    return Job("job", RUN, launch, command, len(deeds), 1, 20.0, Cluster(), environment=environment)


def stream_of(store: Store, rank: int) -> RankStream:
    (stream,) = rank_streams(store, RUN, rank)
    return stream


def has_formed(store: Store, rank: int) -> bool:
    return any(stream.attempt for stream in rank_streams(store, RUN, rank))


@pytest.mark.slow
def test_the_output_of_every_rank_is_in_the_store_with_its_exit(tmp_path: Path, store: Store) -> None:
    ending = launched(tmp_path, job(store.url, "peer", "kill"))
    assert ending.code == 137
    pid = stream_of(store, 1).pid
    assert list(rank_lines(store, RUN, 1)) == [f"rank 1 pid {pid} ready"]
    assert (stream_of(store, 1).code, stream_of(store, 1).attempt) == (137, None)
    peer = stream_of(store, 0)
    assert (peer.code, peer.attempt, peer.launch) == (202, 1, 1)
    assert peer.ended is not None
    assert list(rank_lines(store, RUN, 0, attempt=1)) == [f"rank 0 pid {peer.pid} ready"]
    local = (tmp_path / "logs" / "launch-000001.log").read_text()
    assert f"rank 1 pid {pid} ready" in local
    assert f"rank 0 pid {peer.pid} ready" in local


@pytest.mark.parametrize("store_url", ["file"], indirect=True)
def test_a_traceback_is_kept_whole(tmp_path: Path, store: Store) -> None:
    launched(tmp_path, job(store.url, "raise"))
    lines = list(rank_lines(store, RUN, 0))
    assert lines[1] == "rank 0 leaves: raise"
    assert lines[-1] == "RuntimeError: a bug"


@pytest.mark.slow
def test_a_log_is_readable_while_the_rank_runs(tmp_path: Path, store: Store) -> None:
    launcher, endings = LocalLauncher(tmp_path / "logs"), []
    thread = threading.Thread(target=lambda: endings.append(launcher.run(job(store.url, "save", "save"))))
    thread.start()
    lines = rank_lines(store, RUN, 1, running=lambda: True, poll_seconds=0.1)
    assert next(lines).startswith("rank 1 pid ")
    while not all(has_formed(store, rank) for rank in range(2)):
        assert thread.is_alive(), endings
        time.sleep(0.1)
    assert stream_of(store, 1).ended is None
    launcher.stop()
    thread.join()
    assert [ending.code for ending in endings] == [204], (tmp_path / "logs" / "launch-000001.log").read_text()
    assert stream_of(store, 1).code == 204


@pytest.mark.slow
@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
def test_when_torchrun_is_killed_what_was_kept_can_be_read(tmp_path: Path, store: Store) -> None:
    launcher = LocalLauncher(tmp_path / "logs")
    thread = threading.Thread(target=lambda: launcher.run(job(store.url, "wait")))
    thread.start()
    assert next(rank_lines(store, RUN, 0, running=lambda: True, poll_seconds=0.1)).endswith("ready")
    torchrun = psutil.Process(stream_of(store, 0).pid).parent()
    assert torchrun is not None
    os.kill(torchrun.ppid(), signal.SIGKILL)
    thread.join()
    assert next(rank_lines(store, RUN, 0)).endswith("ready")
    assert stream_of(store, 0).ended is None


@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
def test_an_unreachable_store_neither_fails_nor_blocks_a_gang(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server listens there
    ending = launched(tmp_path, replace(job(store_url, "0", "0"), environment={}))
    assert ending.code == 0
    log = (tmp_path / "logs" / "launch-000001.log").read_text()
    assert "rank 1 leaves: 0" in log
    assert "the last lines of the ranks did not reach the store" in log


@pytest.mark.parametrize("store_url", ["file"], indirect=True)
def test_the_output_of_a_killed_rank_is_not_polled_in_a_busy_loop(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    look_at = RankOutput._look_at

    def counted(self: RankOutput, one: object, last: bool) -> None:
        looks.append(last)
        look_at(self, one, last)  # type: ignore[arg-type]

    monkeypatch.setattr(RankOutput, "_look_at", counted)
    output = RankOutput(Place(store.url, RUN, 1), tmp_path, flush_seconds=0.2)
    reader, writer = output.pipe()
    start = time.monotonic()
    output.follow(reader, 0, 4_000_000)
    os.write(writer, b"the last words\n")
    os.close(writer)
    while True not in looks:
        time.sleep(0.01)
    time.sleep(1.5)  # nothing happens meanwhile: torchrun waits for the other ranks
    assert len(looks) < 10 + (time.monotonic() - start) / 0.1
    output.take_rest(PATIENCE)
    output.close({4_000_000: 137}, PATIENCE)
    assert stream_of(store, 0).code == 137
    assert list(rank_lines(store, RUN, 0)) == ["the last words"]


@pytest.mark.parametrize("store_url", ["file"], indirect=True)
def test_the_last_output_of_a_rank_is_stored_before_its_log_closes(tmp_path: Path, store: Store) -> None:
    output = RankOutput(Place(store.url, RUN, 1), tmp_path)
    reader, writer = output.pipe()
    output.follow(reader, 0, 4_000_000)

    def end() -> None:
        time.sleep(0.3)  # a launcher that did not wait would close the log meanwhile
        os.write(writer, b"the last words\n")
        os.close(writer)

    thread = threading.Thread(target=end)
    thread.start()
    output.take_rest(PATIENCE)
    output.close({}, PATIENCE)
    thread.join()
    assert list(rank_lines(store, RUN, 0)) == ["the last words"]


def test_ranks_that_work_on_no_run_are_only_passed_on(tmp_path: Path) -> None:
    assert Place.of(["0:0"]) is None
    assert Place.of(["--run-id", "r", "--launch", "x", "--store", "s"]) is None
    assert Place.of(["--store", "file:///s", "--run-id", "r", "--launch", "3"]) == Place("file:///s", "r", 3)
    other_job = replace(job("", "0"), command=["-m", "tests.launch.worker", "0:0"])
    assert launched(tmp_path, other_job).code == 0
    assert "rank 0 leaves: 0" in (tmp_path / "logs" / "launch-000001.log").read_text()


@pytest.mark.slow
def test_ranks_that_start_cold_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch was imported with threads, nothing can be forked."""
    store = open_store(f"file://{tmp_path / 'store'}")
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import threads\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launched(tmp_path, job(store.url, "0"))
    assert list(rank_lines(store, RUN, 0))[-1] == "rank 0 leaves: 0"
    assert "every rank imports torch itself" in (tmp_path / "logs" / "launch-000001.log").read_text()


def test_the_exit_detail_has_the_command_for_the_log_of_the_failed_rank(tmp_path: Path, store: Store) -> None:
    jobs = deque([job(store.url, "peer", "12")])
    endings: list[GangExit] = []
    ending = Supervisor(
        LocalLauncher(tmp_path / "logs"),
        jobs.popleft,
        Restarts(budget=0),
        threading.Event(),
        lambda _, e: endings.append(e),
    ).run()
    assert ending.detail.endswith(f"show it: holdfast logs {RUN} --rank 1 --launch 1")
    assert endings == [ending]
    assert json.loads(store.get(f"{layout.rank_log(RUN, 1, stream_of(store, 1).name)}stream.json"))["code"] == 12
    assert isinstance(open_store(store.url), type(store))
