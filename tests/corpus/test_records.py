"""Every format and compression, and every kind of bad input: named by file and line, or counted."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from holdfast.components.preprocess import run
from holdfast.corpus import units
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl

TEXTS = [prose(number) for number in range(50)]
SKIP = {"cleaning": {"on_bad_record": "skip"}}


def written(folder: Path, kind: str) -> Path:
    plain = write_jsonl(folder / "plain.jsonl", TEXTS).read_bytes()
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_bytes(plain)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(plain[:3000]) + gzip.compress(plain[3000:]))
    elif kind == "jsonl.zst":
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(compress(plain[:3000]) + compress(plain[3000:]))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(50), "text": TEXTS}), path, row_group_size=7)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("unit_bytes", [units.UNIT_BYTES, 700])
def test_every_format_gives_the_same_tokens(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, unit_bytes: int
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(units, "SPLIT_PARQUET_BYTES", unit_bytes)
    prepared = run(make_spec(written(tmp_path, kind)), store)
    assert sum(prepared.documents.values()) == 50
    plain = run(make_spec(written(tmp_path, "jsonl")), store)
    shards = [tree(store, f"datasets/{result.dataset_id}/0") for result in (prepared, plain)]
    assert list(shards[0].values()) == list(shards[1].values())


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.zst"])
def test_a_text_file_is_one_document(store: Store, make_spec: MakeSpec, tmp_path: Path, kind: str) -> None:
    raw = "\n\n".join(TEXTS).encode()
    zstd = zstandard.ZstdCompressor().compress
    compress: dict[str, Callable[[bytes], bytes]] = {"txt": bytes, "txt.gz": gzip.compress, "txt.zst": zstd}
    (tmp_path / f"a.{kind}").write_bytes(compress[kind](raw))
    prepared = run(make_spec(tmp_path / f"a.{kind}", validation_fraction=0), store)
    assert prepared.documents == {"train": 1, "validation": 0}
    assert prepared.text_bytes["train"] == len(raw)


@pytest.mark.parametrize(
    ("name", "content", "message", "reason"),
    [
        ("bad.txt", b"good\n\xff\xfe bad", r"bad.txt:2: is not UTF-8 \(byte 0xff at offset 5\)", "undecodable"),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', r"bad.jsonl:3: is not JSON", "not_json"),
        ("bad.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"no text under 'text'; it has 'body';", "no_text"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"bad.jsonl:2: has no text", "no_text"),
        ("bad.jsonl", b'{"text": "a"}\n["text"]\n', r"bad.jsonl:2: .*; it is no JSON object;", "no_text"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', r"bad.jsonl:2: has a lone surrogate", "undecodable"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"bad.jsonl:2: is not UTF-8", "undecodable"),
        ("bad.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, r"bad.jsonl:2: is not JSON", "not_json"),
        ("bad.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"bad.txt.gz: is not whole gzip data", "corrupt"),
        ("bad.txt.gz", b"no gzip", r"bad.txt.gz: is not whole gzip data", "corrupt"),
        ("bad.txt.zst", zstandard.compress(b"text" * 99)[:-3], r"bad.txt.zst: is not whole zstd data", "corrupt"),
        ("bad.txt.zst", b"no zstd", r"bad.txt.zst: is not whole zstd data", "corrupt"),
        ("bad.parquet", b"no parquet", r"bad.parquet: is not whole parquet data", "corrupt"),
    ],
)
def test_a_bad_record_stops_or_is_counted(
    store: Store,
    make_spec: MakeSpec,
    tmp_path: Path,
    name: str,
    content: bytes,
    message: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        run(make_spec(good, tmp_path / name), store)
    assert not [key for key in tree(store, "datasets/") if key.endswith("dataset.json")]
    prepared = run(make_spec(good, tmp_path / name, **SKIP), store)
    assert prepared.dropped[reason] == 1
    assert name in caplog.text


def test_a_bad_line_far_into_a_large_file_has_the_right_number(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 500)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[41] = "not json"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a.jsonl:42: is not JSON"):
        run(make_spec(tmp_path / "a.jsonl"), store)


def test_a_missing_column_and_a_column_of_numbers_are_refused_by_name(
    store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"has no column 'text'; set `text_field` to one of: id, body"):
        run(make_spec(tmp_path / "a.parquet"), store)
    with pytest.raises(DataError, match=r"column 'id' holds int64, not text"):
        run(make_spec({"uri": str(tmp_path / "a.parquet"), "text_field": "id"}), store)
    assert run(make_spec({"uri": str(tmp_path / "a.parquet"), "text_field": "body"}), store).created


@pytest.mark.slow
def test_bombs_are_dropped_in_bounded_memory(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    huge = 300 * 2**20
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(bytes(huge), 1))
    (tmp_path / "bomb.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(b" " * huge + b"\n" + b'{"text": "end"}')
    )
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    import tracemalloc

    tracemalloc.start()
    prepared = run(
        make_spec(good, tmp_path / "bomb.txt.gz", tmp_path / "bomb.jsonl.zst", cleaning={"max_characters": 10_000}),
        store,
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert prepared.dropped == {"too_long": 2}
    assert peak < 80 * 2**20


def test_a_file_that_changes_while_it_is_read_is_refused(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def touch(phase: str, done: int, total: int) -> None:
        raise AssertionError("tokenised a file that had changed")

    import holdfast.corpus.tokenizer as tokenizer

    real = tokenizer.sample

    def change(*arguments: Any) -> Iterator[str]:
        yield from real(*arguments)
        path.write_text("changed")

    monkeypatch.setattr(tokenizer, "sample", change)
    with pytest.raises(DataError, match=r"a.jsonl: changed while it was being read"):
        run(make_spec(path, validation_fraction=0), store, touch)
