"""The log of a launch is bounded, however much its ranks print."""

import io
from collections import deque
from pathlib import Path

import pytest

from holdfast.launch import reporting
from holdfast.launch.local import _keep
from holdfast.launch.reporting import LaunchLog


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test reaches quickly."""
    monkeypatch.setattr(reporting, "FULL_BYTES", 4000)
    monkeypatch.setattr(reporting, "HEAD_BYTES", 500)
    monkeypatch.setattr(reporting, "TAIL_BYTES", 1500)


def test_a_launch_log_keeps_its_head_and_tail_and_states_the_bytes_cut(tmp_path: Path) -> None:
    path, sizes = tmp_path / "launch-000001.log", list[int]()
    lines = [f"line {number} of a rank: ä\n" for number in range(3000)]

    class Printed(io.StringIO):
        def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
            if self.tell():
                sizes.append(path.stat().st_size)
            return super().readline(size)

    for start in range(0, 3000, 1000):  # the file is opened again while a launch ends
        _keep(Printed("".join(lines[start : start + 1000])), path, deque())
    assert max(sizes) <= 4000
    log_lines = path.read_text().splitlines(keepends=True)
    (cut,) = [index for index, line in enumerate(log_lines) if line.startswith("[holdfast: ")]
    head, tail = log_lines[:cut], log_lines[cut + 1 :]
    assert head == lines[: len(head)] != []
    assert tail == lines[-len(tail) :] != []
    cut_bytes = len("".join(lines[len(head) : -len(tail)]).encode())
    assert log_lines[cut] == f"[holdfast: {cut_bytes} bytes of this log were cut here]\n"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_line_without_an_end_is_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with LaunchLog(path) as log:
        for _ in range(500):
            log.write("x" * 100)
            assert path.stat().st_size <= 4000
    text = path.read_text()
    assert text.startswith("x" * 500)
    assert text.endswith("x" * 1500)
    assert "bytes of this log were cut here" in text
