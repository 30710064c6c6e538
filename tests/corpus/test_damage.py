"""Damaged files and files without text: counted under their reason, or refused by name."""

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from holdfast.components.divide import run as divide_step
from holdfast.components.preprocess import run
from holdfast.corpus import divide, prepare, tokenise, units
from holdfast.corpus.records import before
from holdfast.corpus.sources import resolve
from holdfast.corpus.units import documents, plan
from holdfast.dataset.manifest import load_manifest
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.spec.operations import Evaluation, Task
from holdfast.store import Store, layout, open_store
from tests.corpus.conftest import MakeSpec, prose, write_jsonl

TEXTS = [f"Document number {number} has a text that differs. é 你好" for number in range(120)]
LINES = "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=len(text) % 2 == 0) + "\n" for text in TEXTS).encode()
SKIP = {"cleaning": {"on_bad_record": "skip"}}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"


def parquet(path: Path, texts: list[str] = TEXTS, compression: str = "snappy", **options: object) -> bytes:
    table = pa.table({"text": texts, "n": list(range(len(texts)))})
    pq.write_table(table, path, compression=compression, use_dictionary=False, **options)
    return path.read_bytes()


def talks() -> bytes:
    answer = {"role": "assistant", "content": "Yes."}
    lines = [{"messages": [{"role": "user", "content": text}, answer]} for text in TEXTS]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


WHOLE: dict[str, Callable[[Path], bytes]] = {
    "a.jsonl": lambda _: LINES,
    "a.jsonl.gz": lambda _: gzip.compress(LINES[:4000], mtime=0) + gzip.compress(LINES[4000:], mtime=0),
    "a.jsonl.zst": lambda _: zstandard.compress(LINES[:4000]) + zstandard.compress(LINES[4000:]),
    "a.txt": lambda _: LINES,
    "a.txt.gz": lambda _: gzip.compress(LINES, mtime=0),
    "a.txt.zst": lambda _: zstandard.compress(LINES),
    "talk.jsonl": lambda _: talks(),
    "snappy.parquet": lambda path: parquet(path, row_group_size=40),
    "zstd.parquet": lambda path: parquet(path, compression="zstd", row_group_size=40, data_page_version="2.0"),
    "none.parquet": lambda path: parquet(path, compression="none", row_group_size=40),
    "sums.parquet": lambda path: parquet(path, compression="gzip", write_page_checksum=True),
}


def damaged(raw: bytes, random_: random.Random) -> bytes:
    """`raw` with flipped bits, a truncated end, replaced bytes, or a repeated part."""
    mutated, at = bytearray(raw), random_.randrange(len(raw))
    match random_.randrange(4):
        case 0:
            for _ in range(random_.choice([1, 1, 3, 20])):
                mutated[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)
        case 1:
            del mutated[at:]
        case 2:
            mutated[at : at + random_.randrange(1, 64)] = random_.randbytes(random_.randrange(64))
        case 3:
            mutated[at:at] = raw[random_.randrange(len(raw)) :][: random_.randrange(1, 200)]
    return bytes(mutated)


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_raises_only_errors_that_name_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "SPLIT_PARQUET_BYTES", 0)  # planning reads the file
    raw, random_ = WHOLE[name](tmp_path / "whole"), random.Random(name)
    path, flaws, refusals = tmp_path / name, 0, 0
    chat = {"kind": "chat", "document_masks": True} if name == "talk.jsonl" else {}
    for number in range(120):
        path.write_bytes(damaged(raw, random_))
        policy = ("skip", "fail")[number % 2]
        data = Data.model_validate({"sources": [{"uri": str(path)}], "cleaning": {"on_bad_record": policy}, **chat})
        try:
            for piece in plan(resolve(data), data.kind):
                flaws += sum(isinstance(document, units.Flaw) for *_, document in documents(piece, data.cleaning))
                before(piece.files[0], piece.range)
        except HoldfastError as error:
            refusals += 1
            assert name in str(error)
    assert flaws or name == "a.txt"
    assert refusals


def spoiled(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes(byte ^ 0xA5 for byte in raw[at : at + 64]) + raw[at + 64 :]


def test_a_parquet_file_with_a_damaged_page_is_counted_or_refused(
    store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(spoiled(parquet(path), len(parquet(path)) // 3))
    good = write_jsonl(tmp_path / "good.jsonl", [prose(number) for number in range(40)])
    prepared = run(make_spec(good, path, **SKIP), store)
    assert prepared.dropped == {"corrupt": 1}
    assert sum(prepared.documents.values()) == 40
    assert prepared.examples["corrupt"].place == str(path)
    with pytest.raises(DataError, match=r"bad\.parquet: is not whole parquet data"):
        run(make_spec(good, path), store)


def test_only_the_damaged_row_group_of_a_parquet_file_is_dropped(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "SPLIT_PARQUET_BYTES", 0)
    texts: list[str | None] = [*TEXTS]
    texts[100] = None
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=40, use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    path.write_bytes(spoiled(path.read_bytes(), group.data_page_offset + 40))
    prepared = run(make_spec(path, **SKIP), store)
    assert prepared.dropped == {"corrupt": 1, "no_text": 1}
    assert sum(prepared.documents.values()) == 79
    assert prepared.examples["no_text"].place == f"{path}: row 101"


def test_a_parquet_file_with_a_damaged_footer_is_counted_when_it_is_planned(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "SPLIT_PARQUET_BYTES", 0)
    path = tmp_path / "bad.parquet"
    raw = parquet(path)
    path.write_bytes(raw[:-60] + bytes(40) + raw[-20:])
    good = write_jsonl(tmp_path / "good.jsonl", [prose(number) for number in range(40)])
    assert run(make_spec(good, path, **SKIP), store).dropped == {"corrupt": 1}
    with pytest.raises(DataError, match=r"bad\.parquet: is not whole parquet data"):
        run(make_spec(good, path), store)


def frame(window_log: int) -> bytes:
    """A zstd file whose header requests a window of this size, as `zstd --long=N` writes from a pipe."""
    compressor = zstandard.ZstdCompressor().compressobj()
    raw = bytearray(compressor.compress(LINES) + compressor.flush())
    raw[5] = (window_log - 10) << 3  # RFC 8878, 3.1.1.1.2
    return bytes(raw)


def test_a_zstd_file_with_a_long_window_is_read_or_the_window_is_reported(
    store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl.zst"
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00info"
    path.write_bytes(skippable + frame(29) + frame(20) + skippable)
    assert run(make_spec(path), store).dropped == {"duplicate": 120}
    path.write_bytes(frame(20) + frame(30))
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: needs a window of 1,024 MiB, and at most 512 MiB are read"):
        run(make_spec(path), store)
    assert run(make_spec(path, **SKIP), store).dropped == {"window_too_large": 1}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train.npy", "convert it to .jsonl"),
        ("a.rar", "unpack it"),
        ("a.7Z", "unpack it"),
        ("a.idx", "`format` to megatron"),
        ("a.pdf", "extract its text"),
        ("a.pq", "`format` to parquet"),
    ],
)
def test_data_that_are_no_text_are_not_trained_on(
    store: Store, make_spec: MakeSpec, tmp_path: Path, name: str, remedy: str
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [prose(number) for number in range(40)])
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(DataError, match=f"{name}: .* not read as text; .*{remedy}"):
        run(make_spec(tmp_path, good), store)
    prepared = run(make_spec(good, tmp_path / name, **SKIP), store)
    assert prepared.dropped == {"not_text": 1}
    assert prepared.examples["not_text"].place.endswith(name)


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_not_the_file(store: Store, make_spec: MakeSpec, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LFS)
    good = write_jsonl(tmp_path / "good.jsonl", [prose(number) for number in range(40)])
    with pytest.raises(DataError, match=rf"{name}.*: is a pointer of Git LFS and not the file; run `git lfs pull`"):
        run(make_spec(good, tmp_path / name), store)
    assert run(make_spec(good, tmp_path / name, **SKIP), store).dropped["not_text"] >= 1


def test_a_file_with_nul_bytes_is_no_text(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("wide".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"a\.txt: has a NUL byte at offset 1: it is UTF-16 or no text"):
        run(make_spec(tmp_path / "a.txt"), store)


def test_columns_of_words_are_read_and_two_of_one_name_refused(
    store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), path)
    assert sum(run(make_spec(path), store).documents.values()) == 120
    pq.write_table(pa.Table.from_arrays([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns 'text'; rename all but one"):
        run(make_spec(path), store)


def test_an_overlong_line_is_dropped_as_too_long(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    other_keys = json.dumps({"text": "short", "more": "x" * 2**21})
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"text": prose(number)}) for number in range(9)] + [other_keys]))
    prepared = run(make_spec(path, cleaning={"max_characters": 1000}, validation_fraction=0), store)
    assert prepared.dropped == {"too_long": 1}
    assert prepared.examples["too_long"].place == f"{path}:10"
    assert "is a line of 2,097,181 bytes" in prepared.examples["too_long"].detail


@pytest.mark.parametrize("unit_bytes", [units.UNIT_BYTES, 500])
def test_every_reason_has_an_example_with_its_line(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    lines = [json.dumps({"text": prose(number)}) for number in range(40)]
    lines[12:12] = ["", json.dumps({"text": ""}), "not json https://user:secret@host/ \x1b[31m"]
    lines += [json.dumps({"text": prose(5)}), json.dumps({"text": "w " * 900}), json.dumps({"other": 1}), ""]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    spec = make_spec(path, cleaning={"on_bad_record": "skip", "max_characters": 1000})
    prepared = run(spec, store)
    assert prepared.dropped == {"duplicate": 1, "no_text": 1, "not_json": 1, "too_long": 1, "too_short": 1}
    examples = load_manifest(store, prepared.dataset_id).sources[0].examples
    assert examples == prepared.examples
    assert {reason: example.place for reason, example in examples.items()} == {
        "duplicate": f"{path}:44",
        "no_text": f"{path}:46",
        "not_json": f"{path}:15",
        "too_long": f"{path}:45",
        "too_short": f"{path}:14",
    }
    assert examples["duplicate"].excerpt.startswith("# 5")
    assert examples["not_json"].excerpt == "not json https://host/  [31m"
    assert examples["too_short"].detail == "has 0 characters, fewer than data.cleaning.min_characters = 1"
    shared = open_store(f"file://{tmp_path / 'shared'}")
    plan = divide(spec, shared, 3)
    for share in reversed(plan.shares):
        tokenise(spec, shared, plan.division, share)
    prepare(spec, shared, division=plan.division)
    key = layout.dataset(prepared.dataset_id)
    assert shared.get(key) == store.get(key), "the examples depend on no number of workers"


def test_a_task_that_could_not_be_scored_is_known_before_the_data_are_made(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", [prose(number) for number in range(40)])
    spec = make_spec(corpus).model_copy(update={"evaluation": Evaluation(tasks=(Task(uri=f"{tmp_path}/task.yaml"),))})
    for step in (run, divide_step):
        with pytest.raises(MissingError, match=r"there is no task file .*/task\.yaml"):
            step(spec, store)
    kwargs = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}}
    task = {"task": "t", **kwargs, "metric_list": [{"metric": "acc"}]}
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    with pytest.raises(MissingError, match=r"there is no data file rows\.jsonl"):
        run(spec, store)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "task.yaml").write_text(json.dumps({**task, "metric_list": [{"metric": "f1"}]}))
    with pytest.raises(DataError, match=r"has no metric 'acc'; it has f1"):
        run(spec, store)
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    assert run(spec, store).created
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if not installed
    with pytest.raises(MissingError, match=r"needs lm-evaluation-harness: pip install 'holdfast\[tasks\]'"):
        run(spec, store)
