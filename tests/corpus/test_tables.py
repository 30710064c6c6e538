"""Arrow, parquet, .json and .csv: the documents that the writers of such files wrote, in bounded memory."""

import csv
import json
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from holdfast.corpus import arrow_messages, tables
from holdfast.corpus.arrow_messages import batches_of
from holdfast.corpus.compression import CorruptFileError
from holdfast.corpus.files import SourceFile, local_stamp, suffixes
from holdfast.corpus.record_types import Flaw, Reading, Record
from holdfast.corpus.records import place, records
from holdfast.spec.errors import DataError
from tests.corpus.conftest import prose

TEXTS = [prose(number) for number in range(30)]
TALKS = [
    {"messages": [{"role": "user", "content": f"Q {n}?"}, {"role": "assistant", "content": f"A {n}."}]}
    for n in range(5)
]


def source(path: Path) -> SourceFile:
    format_, compression = suffixes(path.name, "auto")
    stamp = local_stamp(path)
    return SourceFile(path.name, "local", "", str(path), "d", path.stat().st_size, stamp, format_, compression)


def read(path: Path, **reading: Any) -> list[Record]:
    return [record for _, record in records(source(path), Reading(**{"max_characters": 10**6, **reading}))]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the suffix says, with the library that people use for it."""
    table = pa.Table.from_pylist(rows)
    if path.name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.name.endswith("array.json"):
        path.write_text(json.dumps(rows, indent=1))
    elif path.name.endswith("lines.json"):
        path.write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    elif path.name.endswith("lz4.arrow"):
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(path, table.schema, options=options) as out:
            out.write_table(table, 7)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, 7)
    else:
        pyarrow.feather.write_feather(table, path, chunksize=7)
    return path


@pytest.mark.parametrize(
    "name", ["array.json", "lines.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "lz4.arrow", "a.feather"]
)
def test_every_table_gives_the_texts_that_were_written(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, [{"id": n, "text": text} for n, text in enumerate(TEXTS)])) == TEXTS


@pytest.mark.parametrize("name", ["array.json", "lines.json", "a.parquet", "a.arrow", "lz4.arrow", "a.feather"])
def test_conversations_of_every_table_are_those_of_jsonl(tmp_path: Path, name: str) -> None:
    expected = read(write(tmp_path / "a.jsonl", TALKS), kind="chat")
    assert not any(isinstance(record, Flaw) for record in expected)
    assert read(write(tmp_path / name, TALKS), kind="chat") == expected


def test_the_files_of_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([*TALKS, {"messages": [*TALKS[0]["messages"], {"role": "tool", "name": "x"}]}])
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.to_json(tmp_path / "a.jsonl")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    expected = [
        json.loads(str(record)) for record in read(tmp_path / "a.jsonl", kind="chat", fields='{"role": "role"}')
    ]
    assert expected[:5] == TALKS
    assert expected[5]["messages"][2] == {"role": "tool", "name": "x"}
    for path in (arrow, tmp_path / "a.parquet"):
        assert [json.loads(str(record)) for record in read(path, kind="chat")] == expected


def test_damaged_tables_are_named_and_what_came_before_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "array.json", [{"text": text} for text in TEXTS])
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    *good, flaw = read(path)
    assert good == TEXTS[: len(good)]
    assert len(good) > 5
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "not_json"
    assert place(source(path), len(good) + 1) == f"array.json: record {len(good) + 1}"
    for rest in ('[{"text": "b"}]', "x"):
        for end in ("]", ",]"):
            (tmp_path / "b.json").write_text(f'[{{"text": "a"}}{end}\n{rest}')
            first, flaw = read(tmp_path / "b.json")
            assert first == "a"
            assert isinstance(flaw, Flaw)
            assert flaw.detail.startswith("follows the end of the array")
    (tmp_path / "b.json").write_bytes(b'[{"text": "a"}, {"text": "\xff"}]')
    assert [record.reason for record in read(tmp_path / "b.json") if isinstance(record, Flaw)] == ["undecodable"]
    (tmp_path / "c.csv").write_bytes(b'text,n\n"a\nb",1\nc\n\xff,2\n"open,3\n')
    first, *flaws = read(tmp_path / "c.csv")
    assert first == "a\nb"
    assert [flaw.reason for flaw in flaws if isinstance(flaw, Flaw)] == ["no_text", "undecodable", "corrupt"]
    path = write(tmp_path / "d.arrow", [{"text": text} for text in TEXTS])
    path.write_bytes(path.read_bytes()[:6000])
    *good, flaw = read(path)
    assert good == TEXTS[:7]
    assert isinstance(flaw, Flaw)


def test_a_table_without_the_wanted_column_names_its_columns(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=r"has no column 'text'; set `text_field` to one of: id, body"):
            read(write(tmp_path / name, [{"id": 1, "body": "x"}]))
        with pytest.raises(DataError, match=r"none of the columns .*messages.*; name its columns in `fields`"):
            read(write(tmp_path / name, [{"id": 1, "body": "x"}]), kind="chat")
    (flaw,) = read(write(tmp_path / "a.csv", [{"id": 1, "body": "x"}]))
    assert isinstance(flaw, Flaw)
    assert "its first row has: id, body" in flaw.detail


def test_a_record_that_is_too_long_ends_a_file_without_being_held(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "' + "b" * 3_000_000 + '"}]')
    first, flaw = read(tmp_path / "a.json", max_characters=10)
    assert first == "a"
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "too_large"
    (tmp_path / "a.csv").write_text('text\na\n"' + "b\n" * 1_500_000)
    first, flaw = read(tmp_path / "a.csv", max_characters=10)
    assert first == "a"
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "too_large"


def test_the_sizes_of_arrow_batches_are_checked_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path / "a.feather", [{"text": "x" * 10**6}]).read_bytes()  # lz4: small on disk
    assert len(plain) < 50_000
    monkeypatch.setattr(arrow_messages, "MAX_BATCH", 500_000)
    (flaw,) = read(tmp_path / "a.feather")
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "too_large"
    monkeypatch.undo()
    stream = tmp_path / "absurd.arrow"
    head = pa.ipc.new_stream(stream, pa.schema([("text", pa.string())]))
    head.write_batch(pa.record_batch({"text": ["a", "b"]}))
    head.close()
    raw = bytearray(stream.read_bytes())
    for at in range(0, len(raw) - 8, 8):  # every number of it becomes absurd once
        damaged = raw[:at] + struct.pack("<q", 2**62) + raw[at + 8 :]
        stream.write_bytes(damaged)
        try:
            assert all(isinstance(record, Flaw | str) for record in read(stream))
        except DataError as error:
            assert "has no column 'text'" in str(error)


def test_random_damage_of_an_arrow_file_never_ends_the_process(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", TALKS)
    raw = path.read_bytes()
    for number in range(60):
        damaged = bytearray(raw)
        for at in range(number * 7, len(raw), 211):
            damaged[at] ^= 1 << number % 8
        path.write_bytes(damaged)
        try:
            read(path, kind="chat")
        except DataError:
            continue


def test_rows_of_nested_parquet_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", TALKS)
    monkeypatch.setattr(tables, "MAX_NESTED", 10)
    with pytest.raises(DataError, match="write smaller row groups"):
        read(path, kind="chat")


def test_a_stream_that_is_not_arrow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(os.urandom(4) + b"\0" * 100)
    (flaw,) = read(tmp_path / "a.arrow")
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "corrupt"
    with (tmp_path / "a.arrow").open("rb") as stream, pytest.raises((ValueError, CorruptFileError)):
        list(batches_of(stream))
