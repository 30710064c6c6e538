"""A small parquet file with large pages is read in little memory: strings, dictionaries, prefixes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.corpus.files import SourceFile, digest_of, local_stamp
from holdfast.corpus.parquet_pages import largest_page
from holdfast.corpus.record_types import Reading
from holdfast.corpus.records import records

MIB = 2**20
PLAIN = {"use_dictionary": False}


def source(path: Path) -> SourceFile:
    return SourceFile(
        path.name, "local", "", str(path), digest_of(path), path.stat().st_size, local_stamp(path), "parquet", ""
    )


READ = """
import resource, sys
from pathlib import Path
from tests.corpus.test_parquet_pages import source
from holdfast.corpus.record_types import Flaw, Reading
from holdfast.corpus.records import records
file = source(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = [(at, one.reason if isinstance(one, Flaw) else one and len(one)) for at, one in records(file, Reading(1000))]
print(len(found), found[-1], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (["a" * (400 * MIB)], PLAIN, "2 (0, 'too_large')"),  # it is never decompressed
        (["b" * (30 * MIB)] * 24, {**PLAIN, "data_page_size": 1, "write_batch_size": 1}, "24 (24, 'too_long')"),
        (["c" * (30 * MIB)] * 24, {"dictionary_pagesize_limit": 2**30}, "24 (24, 'too_long')"),
    ],
    ids=["a long string", "many long strings", "a dictionary"],
)
def test_memory_stays_bounded(texts: list[str], options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", write_statistics=False, **options)
    assert path.stat().st_size < MIB
    process = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    text, _, megabytes = process.stdout.strip().rpartition(" ")
    assert text.endswith(words)
    assert int(megabytes) < 700  # instead of 1,400 or more


def test_an_oversized_page_is_reported_with_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    texts = ["fine", "also fine", "x" * (140 * MIB)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=2, compression="zstd", write_statistics=False)
    rows = list(records(source(path), Reading(1000)))
    assert [text for _, text in rows[:2]] == texts[:2]
    assert rows[-1][1].detail.startswith("row group 1 has a page of 146,800,6")  # type: ignore[union-attr]
    assert "smaller pages or row groups" in rows[-1][1].detail  # type: ignore[union-attr]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_the_sizes_of_all_pages_are_found(version: str, dictionary: bool, statistics: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} " * (number % 50) for number in range(3000)]
    texts[1500] = "z" * 50_000
    options: dict[str, Any] = {"use_dictionary": dictionary, "write_statistics": statistics, "compression": "zstd"}
    pq.write_table(
        pa.table({"text": texts}), path, data_page_version=version, data_page_size=4096, write_page_checksum=True,
        row_group_size=1000, **options,
    )  # fmt: skip
    metadata = pq.ParquetFile(path).metadata
    with path.open("rb") as stream:
        sizes = [largest_page(stream, metadata.row_group(group).column(0)) for group in range(3)]
    assert 50_000 < sizes[1] < metadata.row_group(1).column(0).total_uncompressed_size
    assert max(sizes[0], sizes[2]) < 200_000
    assert [text for _, text in records(source(path), Reading(10**6))] == texts


def test_damaged_headers_are_refused_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some words"] * 100}), path, use_dictionary=False)
    raw = path.read_bytes()
    kinds = set()
    for at in range(4, 40):
        for value in (0, 0xFF, raw[at] ^ 0x55):
            path.write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
            for _, record in records(source(path), Reading(10**6)):
                kinds.add(type(record).__name__)
    assert kinds == {"str", "Flaw", "NoneType"}
