"""Probes of a node: over a folder and over S3, with a disk that refuses, and the output of a driver's tool."""

import itertools
import sys
import time
from pathlib import Path

import pytest

from holdfast.health import machine
from holdfast.store import Store, open_store

# nvidia-smi's output for the queried fields: a board without ECC, and a board with faults.
PLAIN = "570.124.06, 00000000:01:00.0, [N/A], [N/A], [N/A], [N/A], [N/A]\n"
FAULTY = "570.124.06, 00000000:18:00.0, 2, 31, 1, No, Yes\n"


def test_the_store_is_probed_with_its_clock_and_nothing_is_left_there(store: Store, tmp_path: Path) -> None:
    node = machine.disk_and_store(tmp_path / "disk", store, "health/")
    assert node.rates["disk"] > 0 and node.rates["store"] > 0 and not node.notes
    assert node.clock_ahead is not None and abs(node.clock_ahead) <= node.clock_error  # the same machine and clock
    assert list(store.list("")) == []
    assert list((tmp_path / "disk").iterdir()) == []


def test_rates_are_what_went_there_and_back_in_the_time_that_it_took(tmp_path: Path) -> None:
    seconds = itertools.count()  # each read of the clock is a second after the previous one
    store = open_store(f"file://{tmp_path / 'store'}")
    node = machine.disk_and_store(tmp_path / "disk", store, "health/", lambda: float(next(seconds)))
    # Two reads for the store: two seconds.
    assert node.rates == {"disk": machine.DISK_BYTES, "store": machine.STORE_BYTES}


def test_a_wrong_clock_differs_from_the_clock_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, true = open_store(f"file://{tmp_path / 'store'}"), time.time
    monkeypatch.setattr(machine, "time", type("Late", (), {"time": lambda: true() - 3600}))
    node = machine.disk_and_store(tmp_path / "disk", store, "health/", time.perf_counter)
    assert node.clock_ahead is not None and node.clock_ahead < -3000


def test_a_disk_that_takes_nothing_is_a_note_and_no_rate(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = machine.disk_and_store(tmp_path / "file" / "folder", None, "")
    assert node.rates == {"disk": 0.0}
    assert node.notes == [f"disk: {tmp_path / 'file' / 'folder'}: Not a directory"]


def test_an_answer_that_cannot_be_read_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output_of", lambda *_: ("No devices were found\n", ""))
    assert machine.counters("cuda", "0")[2] == ["counters: nvidia-smi answered 'No devices were found'"]


def test_only_recent_faults_of_the_kernels_log_speak_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(seconds_ago: float) -> dict[str, int]:
        logged_at = int(1e6 * (time.clock_gettime(time.CLOCK_MONOTONIC) - seconds_ago))
        log = tmp_path / "kmsg"
        log.write_text(f"4,17,{logged_at},-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n")
        monkeypatch.setattr(machine, "KERNEL_LOG", log)
        return machine._xids("00000000:18:00.0")[0]

    assert counted(60.0) == {"xid 79": 1}
    assert counted(machine.XID_SECONDS + 60.0) == {}


def test_the_answers_of_the_drivers_tool_become_counters() -> None:
    assert machine.parse_counters(PLAIN) == ({}, "570.124.06", "00000000:01:00.0")
    assert machine.parse_counters(FAULTY)[0] == {
        "uncorrected ECC errors": 2, "corrected ECC errors": 31, "failed row remaps": 1, "pending row remaps": 0,
        "pending retired pages": 1,
    }  # fmt: skip


def test_xids_are_counted_for_the_device_that_they_are_of() -> None:
    log = (
        "6,1,2,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,2,3,-;NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>\n"
        "6,3,4,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1\n"
    )
    assert machine.parse_xids(log, "00000000:18:00.0") == {"xid 79": 2}
    assert machine.parse_xids(log, "") == {"xid 79": 2, "xid 48": 1}


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(machine, "COMMAND_SECONDS", 120.0)


def test_a_missing_refusing_or_silent_driver_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.counters("cuda", "x")[2] == ["counters: nvidia-smi cannot be run here: No such file or directory"]
    tool(tmp_path, monkeypatch, "import sys; sys.exit('NVML: no permission')")
    assert machine.counters("cuda", "x")[2] == ["counters: nvidia-smi: NVML: no permission"]
    tool(tmp_path, monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "COMMAND_SECONDS", 0.1)
    assert machine.counters("cuda", "x")[2] == ["counters: nvidia-smi did not answer in 0.1 s"]


def test_counters_are_read_for_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import sys; assert sys.argv[-1] == '--id=GPU-1234', sys.argv; print({FAULTY!r})"
    tool(tmp_path, monkeypatch, script)
    monkeypatch.setattr(machine, "KERNEL_LOG", tmp_path / "no such log")
    counters, versions, notes = machine.counters("cuda", "1234")
    assert counters["uncorrected ECC errors"] == 2 and versions == {"NVIDIA driver": "570.124.06"}
    assert notes == ["counters: Xid: the kernel's log cannot be read here: No such file or directory"]
