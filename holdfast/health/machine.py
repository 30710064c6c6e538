"""Probes of a node: its disk, its connection to the store, its clock, its driver's counters, and its versions.

Each is bounded in time and raises nothing: a failed measurement becomes a note with the reason.
"""

import os
import platform
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.health.verdict import Probe
from holdfast.spec.errors import HoldfastError
from holdfast.store import Store

DISK_BYTES, STORE_BYTES = 16 << 20, 4 << 20
COMMAND_SECONDS = 10.0  # for a reply of the driver's tool
STORE_CLOCK = 1.0  # resolution in seconds of the store's modification times
KERNEL_LOG = Path("/dev/kmsg")
XID_SECONDS = 3600.0  # age up to which a fault in the kernel's log, which begins at boot, counts for the device
_KERNEL_BYTES = 16 << 20  # bytes of it that are read; its buffer is smaller

_COUNTERS = {  # by nvidia-smi's names
    "ecc.errors.uncorrected.volatile.total": "uncorrected ECC errors",
    "ecc.errors.corrected.volatile.total": "corrected ECC errors",
    "remapped_rows.failure": "failed row remaps",
    "remapped_rows.pending": "pending row remaps",
    "retired_pages.pending": "pending retired pages",
}
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+)", re.IGNORECASE)


@dataclass
class Node:
    """Measurements of a node."""

    rates: dict[Probe, float] = field(default_factory=dict)  # bytes per second
    clock_ahead: float | None = None  # seconds ahead of the store's clock
    clock_error: float = 0.0
    notes: list[str] = field(default_factory=list)


def disk_and_store(
    folder: Path, store: Store | None, prefix: str, clock: Callable[[], float] = time.perf_counter
) -> Node:
    """Measure how fast this node writes to `folder` and to the store, and how far its clock is from the store's. Its
    keys begin with `prefix`. Leaves nothing behind."""
    node = Node()
    try:
        node.rates["disk"] = disk_rate(folder, clock)
    except OSError as error:
        node.notes.append(f"disk: {folder}: {error.strerror or error}")
        node.rates["disk"] = 0.0
    if store is None:
        return node
    key = f"{prefix}probe-{uuid.uuid4().hex}"
    try:
        start, now = clock(), time.time()
        store.put(key, os.urandom(STORE_BYTES))
        took = clock() - start
        probe = store.stat(key)
        start = clock()
        store.get(key)
        took += clock() - start
    except HoldfastError as error:  # an unavailable store says nothing about the node
        node.notes.append(f"store: {error}")
        return node
    finally:
        with suppress(HoldfastError):
            store.delete(key)
    node.rates["store"] = 2 * STORE_BYTES / max(took, 1e-9)
    if probe is not None:
        half = (time.time() - now) / 2
        node.clock_ahead, node.clock_error = now + half - probe.modified, half + STORE_CLOCK
    return node


def disk_rate(folder: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that reach the disk of a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, block = folder / f"health-{uuid.uuid4().hex}", os.urandom(1 << 20)
    start = clock()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return DISK_BYTES / max(clock() - start, 1e-9)
    finally:
        path.unlink(missing_ok=True)


def counters(kind: str, uuid_of_device: str) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """The counters of an NVIDIA device's driver, its version, and notes; for other kinds of devices only a note."""
    if kind != "cuda":
        return {}, {}, [] if kind == "cpu" else [f"counters: nothing here reads those of {kind}"]
    names = ("driver_version", "pci.bus_id", *_COUNTERS)
    answer, reason = _output_of(
        "nvidia-smi",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader,nounits",
        f"--id=GPU-{uuid_of_device.removeprefix('GPU-')}",
    )
    if answer is None:
        return {}, {}, [f"counters: {reason}"]
    try:
        values, driver, bus = parse_counters(answer)
    except ValueError:
        return {}, {}, [f"counters: nvidia-smi answered {answer.strip()[:100]!r}"]
    notes = [f"counters: {name} is not supported by the device" for name in _COUNTERS.values() if name not in values]
    xids, reason = _xids(bus)
    return values | xids, {"NVIDIA driver": driver}, notes + ([f"counters: Xid: {reason}"] if reason else [])


def parse_counters(line: str) -> tuple[dict[str, int], str, str]:
    """The counters, the driver's version and the device's bus from a line of nvidia-smi. Counters that the device does
    not support are left out. Raises ValueError for any other line."""
    driver, bus, *values = (part.strip() for part in line.strip().split(","))
    counts = {name: int(value) for name, value in zip(_COUNTERS.values(), values, strict=False) if value.isdigit()}
    words = {"yes": 1, "no": 0}
    counts |= {
        name: words[value.lower()]
        for name, value in zip(_COUNTERS.values(), values, strict=False)
        if value.lower() in words
    }
    return counts, driver, bus


def parse_xids(text: str, bus: str) -> dict[str, int]:
    """Xid of the device at `bus` → number of its entries in the kernel's log."""
    counts: dict[str, int] = {}
    place = _place(bus)
    for device, number in _XID.findall(text):
        if not place or _place(device) == place:
            counts[f"xid {number}"] = counts.get(f"xid {number}", 0) + 1
    return counts


def _place(bus: str) -> str:
    """The bus and the device. The driver writes the domain with four or eight digits, and the function optionally."""
    return ":".join(bus.lower().split(".")[0].split(":")[-2:])


def _xids(bus: str) -> tuple[dict[str, int], str]:
    try:
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return {}, f"the kernel's log cannot be read here: {error.strerror}"
    text, read = [], 0
    try:
        while read < _KERNEL_BYTES and (record := os.read(descriptor, 8192)):
            if time.clock_gettime(time.CLOCK_MONOTONIC) - _time_of(record) < XID_SECONDS:
                text.append(record)
            read += len(record)
    except OSError:  # BlockingIOError: the end of the log
        pass
    finally:
        os.close(descriptor)
    return parse_xids(b"".join(text).decode("utf-8", "replace"), bus), ""


def _time_of(record: bytes) -> float:
    """When the kernel wrote a record, in seconds of its monotonic clock: `priority,number,microseconds,flags;text`."""
    try:
        return int(record.split(b";", 1)[0].split(b",")[2]) / 1e6
    except (IndexError, ValueError):
        return 0.0


def system_versions() -> Mapping[str, str]:
    """Versions that every node has, for any device."""
    return {
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "C library": "-".join(platform.libc_ver()),
    }


def _output_of(*command: str) -> tuple[str | None, str]:
    """The output of a command; None and the reason if it fails or does not respond."""
    try:
        process = subprocess.run(
            command, capture_output=True, check=False, timeout=COMMAND_SECONDS, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        return None, f"{command[0]} cannot be run here: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not answer in {COMMAND_SECONDS:g} s"
    if process.returncode != 0:
        return None, f"{command[0]}: {(process.stderr or process.stdout).strip()[:200]}"
    return process.stdout, ""
