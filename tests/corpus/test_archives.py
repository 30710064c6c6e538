"""Archives and compressed files: what `zipfile`, `webdataset`, `lzma` and `bz2` wrote, in bounded memory."""

import bz2
import io
import json
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from holdfast.corpus import archives
from holdfast.corpus.compression import decompressed
from holdfast.corpus.record_types import Flaw
from tests.corpus.conftest import prose, write_jsonl
from tests.corpus.test_tables import TALKS, read

TEXTS = [prose(number) for number in range(12)]


def test_xz_and_bzip2_files_give_their_lines(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    two = lzma.compress(plain[:500]) + b"\0" * 8 + lzma.compress(plain[500:], format=lzma.FORMAT_ALONE)
    (tmp_path / "a.jsonl.xz").write_bytes(two)
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(plain[:500]) + bz2.compress(plain[500:]))
    assert read(tmp_path / "a.jsonl.xz") == read(tmp_path / "a.jsonl.bz2") == TEXTS
    for name in ("a.jsonl.xz", "a.jsonl.bz2"):
        raw = (tmp_path / name).read_bytes()
        for damaged in (raw[:-20], raw[:40] + bytes(9) + raw[49:]):
            (tmp_path / name).write_bytes(damaged)
            *good, flaw = read(tmp_path / name)
            assert good == TEXTS[: len(good)]
            assert isinstance(flaw, Flaw)
            assert flaw.reason in ("corrupt", "not_json")


def test_an_xz_file_that_wants_too_much_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"text", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**30}]))
    (flaw,) = read(path)
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "window_too_large"


def test_a_bomb_of_xz_takes_little_memory() -> None:
    with decompressed(io.BytesIO(lzma.compress(bytes(64 * 2**20))), "xz") as stream:
        assert len(stream.read(1000)) == 1000


def zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_files_of_a_zip_are_read_by_their_suffixes(tmp_path: Path, compression: int) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS[:5]).read_bytes()
    members = {
        "a/lines.jsonl": lines,
        "__MACOSX/a/._lines.jsonl": b"\0",
        "b.txt": TEXTS[5].encode(),
        "c.json": json.dumps([{"text": text} for text in TEXTS[6:8]]).encode(),
        "d.jsonl.bz2": bz2.compress(lines),
        "e.png": b"\x89PNG",
    }
    *good, flaw = read(zipped(tmp_path / "a.zip", members, compression))
    assert good == [*TEXTS[:8], *TEXTS[:5]]
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "not_text"
    assert flaw.detail.startswith("e.png: .png files are not read")


def test_damage_and_bombs_of_a_zip_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.zip", {"a.txt": bytes(5 * 10**6), "b.txt": b"good"})
    bomb, good = read(path, max_characters=1000)
    assert good == "good"
    assert isinstance(bomb, Flaw)
    assert bomb.reason == "too_long"
    raw = zipped(path, {"a.txt": TEXTS[0].encode(), "b.txt": b"good"}).read_bytes()
    path.write_bytes(raw[:60] + bytes(20) + raw[80:])
    flaw, good = read(path)
    assert good == "good"
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "corrupt"
    path.write_bytes(raw[:-10])
    (flaw,) = read(path)
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "corrupt"
    entry = raw.index(b"PK\x01\x02")  # in the directory: the version that a reader needs follows after two bytes
    path.write_bytes(raw[: entry + 6] + struct.pack("<H", 99) + raw[entry + 8 :])
    (flaw,) = read(path)
    assert isinstance(flaw, Flaw)
    assert (flaw.reason, "cannot be read (zip file version 9.9)" in flaw.detail) == ("corrupt", True)
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):  # `zipfile` bounds no output; a dictionary has 4 GiB
        zipped(path, {"a.txt": b"x"}, compression)
        (flaw,) = read(path)
        assert isinstance(flaw, Flaw)
        assert f"has the compression {compression}" in flaw.detail
    monkeypatch.setattr(archives, "MAX_READ", 100)  # of the directory
    zipped(path, {f"{number}.txt": b"x" for number in range(9)})
    (flaw,) = read(path)
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "too_large"


@pytest.mark.parametrize("name", ["shard.tar", "shard.tar.gz", "shard.tgz"])
def test_the_samples_of_webdataset_are_those_of_its_reader(tmp_path: Path, name: str) -> None:
    wds = pytest.importorskip("webdataset")
    path = tmp_path / name
    with wds.TarWriter(str(path), compress=name != "shard.tar") as out:
        for number, text in enumerate(TEXTS):
            out.write({"__key__": f"a/{number:03d}", "txt": text, "json": {"id": number}, "jpg": b"\xff\xd8"})
    reader = wds.WebDataset(str(path), shardshuffle=False).decode()
    assert read(path) == [sample["txt"] for sample in reader] == TEXTS
    with wds.TarWriter(str(path), compress=name != "shard.tar") as out:
        for number, talk in enumerate(TALKS):
            out.write({"__key__": f"{number}", "json": talk})
    found = [json.loads(str(record)) for record in read(path, kind="chat")]
    assert found == [sample["json"] for sample in wds.WebDataset(str(path), shardshuffle=False).decode()] == TALKS


def tarred(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_what_a_tar_has_besides_samples_is_read_or_named(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3]).read_bytes()
    members = [("README", b"x"), ("a.jsonl", lines), ("b.txt", b"long" * 400_000), ("c.txt", b""), ("d.png", b"x")]
    flaw, *good, long, empty, image = read(tarred(tmp_path / "a.tar", members), max_characters=10_000)
    assert good == TEXTS[:3]
    assert empty == ""
    flaws = [record for record in (flaw, long, image) if isinstance(record, Flaw)]
    assert [flaw.reason for flaw in flaws] == ["not_text", "too_long", "no_text"]
    assert flaws[2].detail == "d: has no text under 'text', and no .txt; it has .png"


def test_a_damaged_member_of_a_tar_leaves_the_others(tmp_path: Path) -> None:
    lines = bz2.compress(write_jsonl(tmp_path / "a.jsonl", TEXTS[:3]).read_bytes())
    members = [("a.jsonl.bz2", lines[:10] + bytes(9) + lines[19:]), ("b.csv", b"other\n1\n"), ("c.txt", b"good")]
    *flaws, good = read(tarred(tmp_path / "a.tar", members))
    assert good == "good"
    assert [(flaw.reason, flaw.detail.partition(":")[0]) for flaw in flaws if isinstance(flaw, Flaw)] == [
        ("corrupt", "a.jsonl.bz2"),
        ("no_text", "b.csv"),
    ]


def test_the_text_of_a_sample_may_have_its_own_extension(tmp_path: Path) -> None:
    path = tarred(tmp_path / "a.tar", [("a.caption", b"wanted"), ("a.en.txt", b"other"), ("a.txt", b"text")])
    assert read(path, text_field="caption") == ["wanted"]
    assert read(path) == ["text"]


def test_damage_and_absurd_sizes_of_a_tar_are_named(tmp_path: Path) -> None:
    path = tarred(tmp_path / "a.tar", [(f"{number}.txt", text.encode()) for number, text in enumerate(TEXTS)])
    raw = path.read_bytes()
    for damaged in (raw[:3000], raw[:2048] + b"\xff" * 600 + raw[2648:]):
        path.write_bytes(damaged)
        *good, flaw = read(path)
        assert 0 < len(good) < 6
        assert good == TEXTS[: len(good)]
        assert isinstance(flaw, Flaw)
        assert flaw.reason == "corrupt"
    for size in (2**60, -(2**40)):  # in base 256, of an extended header that `tarfile` reads whole
        header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
        header[156:157] = b"x"
        header[124:136] = struct.pack(">iq", -1 if size < 0 else -(2**31), size)
        header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:]))
        path.write_bytes(bytes(header) + bytes(1024))
        (flaw,) = read(path)
        assert isinstance(flaw, Flaw)
        assert flaw.reason in ("too_large", "corrupt")
