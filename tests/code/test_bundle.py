"""Bundles of user code: the same bytes for the same files, and nothing runs from other bytes."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from holdfast.code import bundle
from holdfast.code.bundle import CodeFile, digest_of, fetch_code, make_bundle, pack, publish, read_bundle
from holdfast.code.packages import requirements_of
from holdfast.spec.errors import DataError, MissingError, SpecError
from holdfast.store import layout, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "parts" / "__pycache__").mkdir(parents=True)
    (root / "mine.py").write_text("def loss(logits, targets):\n    return logits.sum()\n")
    (root / "parts" / "__init__.py").write_text("")
    (root / "parts" / "words.txt").write_text("one\n")
    (root / "parts" / "__pycache__" / "x.py").write_text("left out")
    return root


def test_equal_files_are_the_same_bundle_for_any_times_order_and_surroundings(folder: Path, tmp_path: Path) -> None:
    first = make_bundle(folder)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "a.py").write_text("left out")
    (folder / "notes.md").write_text("left out")
    os.utime(folder / "mine.py", (1, 1))
    assert make_bundle(folder) == first
    assert first.paths == ("mine.py", "parts/__init__.py")
    assert make_bundle(folder, ["*.txt"]).paths[-1] == "parts/words.txt"
    (folder / ".holdfastignore").write_text("# tests\nparts/\n")
    assert make_bundle(folder).paths == ("mine.py",)
    (folder / "mine.py").chmod(0o755)
    assert make_bundle(folder).digest != first.digest, "whether a file is executable is in the digest"


path_text = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}\.py", fullmatch=True)


@pytest.mark.slow
@given(st.dictionaries(path_text, st.tuples(st.binary(max_size=40), st.booleans()), max_size=8))
def test_what_is_packed_is_read_back_and_any_changed_byte_is_refused(made: dict[str, tuple[bytes, bool]]) -> None:
    files = [CodeFile(path, data, executable) for path, (data, executable) in made.items()]
    data = pack(files)
    assert data == pack(files[::-1])
    assert sorted(read_bundle(data, digest_of(data)), key=lambda file: file.path) == sorted(
        files, key=lambda file: file.path
    )
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    with pytest.raises(DataError, match="it was changed"):
        read_bundle(bytes(changed), digest_of(data))


def _listed(*paths: str, content: bytes = b"x", size: int = 1, digest: str = "", version: int = 1) -> bytes:
    entries = [
        {"path": path, "size": size, "executable": False, "digest": digest or blake3(content).hexdigest()}
        for path in paths
    ]
    return json.dumps({"version": version, "files": entries}).encode() + b"\n" + content * len(paths)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_listed("../up.py"), "no relative path"),
        (_listed("/etc/cron.py"), "no relative path"),
        (_listed("a//b.py"), "no relative path"),
        (_listed("a\\b.py"), "no relative path"),
        (_listed("c:x.py"), "no relative path"),
        (_listed("a\n.py"), "not every system keeps"),
        (_listed("x" * 600), "longer than"),
        (_listed("a.py", "a.py"), "listed twice"),
        (_listed("a", "a/b.py"), "a file and a folder"),
        (_listed(*(f"f{number}.py" for number in range(bundle.MAX_FILES + 1))), "does not have the files"),
        (_listed("a.py", size=2), "does not have the files"),
        (_listed("a.py", size=-1), "is damaged"),
        (_listed("a.py", digest="0" * 64), "is not the one that it lists"),
        (_listed("a.py", version=2), "version 2"),
        (b"no listing", "is damaged"),
        (b"[" * 10_000 + b"\n", "is damaged"),
        (b"", "is damaged"),
    ],
)
def test_a_hostile_listing_writes_nothing(data: bytes, says: str, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    digest = digest_of(data)
    store.put(layout.code(digest), data)
    with pytest.raises(DataError, match=says):
        fetch_code(store, digest, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "code").iterdir()] == [".lock"]


def test_a_bundle_is_unpacked_once_and_nothing_else_runs_under_its_digest(folder: Path, tmp_path: Path) -> None:
    store, cache = open_store(f"file://{tmp_path}/store"), tmp_path / "cache"
    made = make_bundle(folder)
    digest = publish(store, made)
    assert publish(store, made) == digest
    unpacked = fetch_code(store, digest, cache)
    assert (unpacked / "mine.py").read_text() == (folder / "mine.py").read_text()
    assert not (unpacked / "mine.py").stat().st_mode & 0o222
    store.delete(layout.code(digest))
    assert fetch_code(store, digest, cache) == unpacked, "the node has it"
    (unpacked / "mine.py").chmod(0o644)
    (unpacked / "mine.py").write_text("changed on the node")
    with pytest.raises(MissingError, match="submit the run again"):
        fetch_code(store, digest, cache)
    store.put(layout.code(digest), made.data + b"#")
    with pytest.raises(DataError, match="it was changed"):
        fetch_code(store, digest, cache)
    publish(store, made)
    assert (fetch_code(store, digest, cache) / "mine.py").read_text() == (folder / "mine.py").read_text()
    with pytest.raises(DataError, match="no digest"):
        fetch_code(store, "blake3:../../x", cache)


@pytest.mark.parametrize("foreign", ["a file of a terabyte", "a pipe"])
def test_an_unpacked_folder_is_replaced_without_reading_what_no_bundle_has(
    folder: Path, tmp_path: Path, foreign: str
) -> None:
    store, cache = open_store(f"file://{tmp_path}/store"), tmp_path / "cache"
    digest = publish(store, make_bundle(folder))
    unpacked = fetch_code(store, digest, cache)
    unpacked.chmod(0o755)
    (unpacked / "mine.py").unlink()
    if foreign == "a pipe":
        os.mkfifo(unpacked / "mine.py")
    else:
        with (unpacked / "mine.py").open("wb") as file:
            file.truncate(2**40)
    assert (fetch_code(store, digest, cache) / "mine.py").read_text() == (folder / "mine.py").read_text()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (".env", "X=1", "name of secrets"),
        ("server.pem", "x", "name of secrets"),
        ("credentials.py", "x = 1", "name of secrets"),
        ("api_key.txt", "x", "name of secrets"),
        ("keys.py", "token = 'hf_" + "a1" * 17 + "'", "looks like a key, in line 1"),
        ("queue.py", "x = 1", "Python's own module 'queue'"),
        ("queue/__init__.py", "x = 1", "Python's own module 'queue'"),
        ("torch/__init__.py", "x = 1", "the module 'torch'"),
        ("a\tb.py", "x = 1", "not every system keeps"),
    ],
)
def test_what_may_not_travel_is_refused_by_name(folder: Path, name: str, content: str, says: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    with pytest.raises(SpecError, match=says) as refused:
        make_bundle(folder, ["*.txt", ".env", "*.pem"])
    assert refused.value.exit_code == 10


def test_a_link_to_a_file_of_secrets_is_refused(folder: Path) -> None:
    (folder / ".env").write_text("X=1")
    (folder / "words.txt").symlink_to(folder / ".env")
    with pytest.raises(SpecError, match="name of secrets"):
        make_bundle(folder, ["*.txt"])


def test_no_more_is_read_than_a_bundle_can_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    for number in range(9):
        (folder / f"part{number}.py").write_text("x = 1\n")
    read = bundle.read_file_bounded

    def counted(path: Path, most: int) -> bytes:
        reads.append(path)
        return read(path, most)

    monkeypatch.setattr(bundle, "read_file_bounded", counted)
    monkeypatch.setattr(bundle, "MAX_FILES", 3)
    with pytest.raises(SpecError, match="more than 3 files of code"):
        make_bundle(folder)
    assert len(reads) == 4


def test_links_out_of_the_folder_and_too_much_code_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.py").write_text("x = 1")
    (folder / "out.py").symlink_to(tmp_path / "outside.py")
    (folder / "data").symlink_to(tmp_path)
    (folder / "inside.py").symlink_to(folder / "mine.py")
    with pytest.raises(SpecError) as refused:
        make_bundle(folder)
    assert {problem.value for problem in refused.value.problems} == {"out.py", "data"}
    (folder / ".holdfastignore").write_text("out.py\ndata\n")
    assert "inside.py" in make_bundle(folder).paths
    for limit, says in (("MAX_FILES", "files of code"), ("MAX_BYTES", "bytes of code"), ("MAX_ENTRIES", "and folders")):
        with monkeypatch.context() as patch, pytest.raises(SpecError, match=says):
            patch.setattr(bundle, limit, 2 if limit != "MAX_BYTES" else 60)
            make_bundle(folder)
    with pytest.raises(MissingError, match="no such folder"):
        make_bundle(tmp_path / "nowhere")


def test_the_requirements_of_a_lock_have_no_hashes_which_pip_would_demand_of_all_packages() -> None:
    lock = (
        "--extra-index-url https://me:pass-word-1@host/simple\nnumpy==2.1.0 \\\n    --hash=sha256:aa \\\n"
        "    --hash=sha256:bb\n    # via torch\nMLflow[extras]==3.1.0  # via x\npandas==2 ; python_version < '4'\n"
    )
    found = requirements_of(lock)
    assert [found[name] for name in ("numpy", "mlflow", "pandas")] == [
        "numpy==2.1.0",
        "MLflow[extras]==3.1.0",
        "pandas==2 ; python_version < '4'",
    ]
    assert len(found) == 4
    assert "pass-word-1" not in str(list(found.values()))


def test_other_packages_than_those_of_the_lock_are_all_named_where_the_code_would_run(
    folder: Path, tmp_path: Path
) -> None:
    store, cache = open_store(f"file://{tmp_path}/store"), tmp_path / "cache"
    lock = folder / "requirements.lock"
    lock.write_text(
        f"# exact\n--index-url x\nBlake3=={version('blake3')} \\\n    --hash=sha256:00\n"
        f"torch=={version('torch').partition('+')[0]}\nwindows-only==1 ; sys_platform == 'win32'\n"
    )
    assert fetch_code(store, publish(store, make_bundle(folder)), cache)
    lock.write_text("blake3==0.0.1\nno_such_package==2\n")
    digest = publish(store, make_bundle(folder))
    for _ in range(2):  # also where it was unpacked before
        with pytest.raises(SpecError) as refused:
            fetch_code(store, digest, cache)
        assert [problem.value for problem in refused.value.problems] == ["blake3==0.0.1", "no_such_package==2"]
    assert refused.value.exit_code == 10
    lock.write_text("blake3>=1\n")
    with pytest.raises(SpecError, match="names no exact version"):
        make_bundle(folder)
