"""The readers of logs hold a bounded part of a line that does not end."""

import subprocess
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.launch.local import _keep
from holdfast.pipelines.backends.local.backend import _lines
from holdfast.pipelines.backends.local.run import tail_of
from holdfast.pipelines.backends.slurm.backend import _new_lines
from holdfast.runtime.output import LONGEST_LINE, LineCutter, printed_by
from holdfast.store import open_store
from holdfast.store.log_stream import StreamReader

ENDLESS = 24 * 2**20
MEMORY = 12 * 2**20


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with a line of many megabytes between two others."""
    path = tmp_path_factory.mktemp("log") / "run.log"
    path.write_bytes(b"first\n" + b"x" * ENDLESS + b"\nlast\n")
    return path


def _of_a_process(path: Path, _: Path) -> Iterator[str]:
    copy = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer)"
    with subprocess.Popen([sys.executable, "-c", copy, str(path)], stdout=subprocess.PIPE) as process:
        for text in printed_by(process):
            yield from text.splitlines()


def _of_a_stream(path: Path, folder: Path) -> Iterator[str]:
    store = open_store(f"file://{folder}")
    with path.open("rb") as file:
        for number in range(ENDLESS // 2**20 + 1):
            store.put(f"stream/{number:06d}.log", file.read(2**20))
    tracemalloc.reset_peak()
    reader = StreamReader(store, "stream/")
    yield from reader.new_lines()
    yield from reader.rest()


@pytest.mark.parametrize(
    "read",
    [
        lambda path, _: _lines(path, None),
        lambda path, _: _new_lines(path, LineCutter(), whole=True),
        _of_a_process,
        _of_a_stream,
    ],
    ids=["local", "slurm", "process", "stream"],
)
def test_a_line_that_does_not_end_is_cut_with_a_mark(
    endless: Path, tmp_path: Path, read: Callable[[Path, Path], Iterator[str]]
) -> None:
    tracemalloc.start()
    try:
        lines = list(read(endless, tmp_path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (lines[0], lines[-1], len(lines)) == ("first", "last", 3)
    assert lines[1].endswith(f"x [holdfast: {ENDLESS - LONGEST_LINE} bytes of this line were cut here]")
    assert peak < MEMORY


def test_a_launch_log_keeps_an_endless_line_and_its_writer_holds_a_piece_of_it(endless: Path, tmp_path: Path) -> None:
    tail: deque[str] = deque(maxlen=9)
    tracemalloc.start()
    try:
        with endless.open() as output:
            _keep(output, tmp_path / "log", tail)
        assert (tmp_path / "log").stat().st_size == endless.stat().st_size
        assert tail[-1] == "last"
        assert tail_of(endless).endswith("x\nlast")
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_a_cut_leaves_no_half_of_a_secret() -> None:
    cutter = LineCutter()
    secret = b"key=" + b"s" * 400
    (line,) = cutter.add(b"x" * (LONGEST_LINE - 200) + b" " + secret + b"\n")
    assert line == b"x" * (LONGEST_LINE - 200) + b" [holdfast: 405 bytes of this line were cut here]"
    assert [*cutter.add(b"a\r\n\nb"), *cutter.rest(), *cutter.rest()] == [b"a\r", b"", b"b"]
