"""The folder store with dying processes, full disks and held locks: real processes, real signals, real disks."""

import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.spec.errors import AccessDeniedError, DataError, NoSpaceError, SpecError, StoreUnreachableError
from holdfast.store import ConflictError, Store, open_store

OLD, NEW = b"old content", b"new and longer content" * 1000
STEPS = ("open", "write", "fsync", "close", "replace", "link", "mkdir")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(f"file://{root}", deadline=20)


def unfinished(root: Path) -> list[Path]:
    folder = root / ".holdfast" / "unfinished"
    return list(folder.iterdir()) if folder.exists() else []


def dies_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that kills itself with SIGKILL at system call number `step`. Returns whether it got that
    far. If the call is a write, the child first writes half of it.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def made(*args: object, **named: object) -> object:
                nonlocal calls
                calls += 1
                if calls == step:
                    if name == "write":
                        call(args[0], args[1][: len(args[1]) // 2])  # type: ignore[arg-type,index]
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **named)

            return made

        for name in STEPS:
            setattr(os, name, counted(name, getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["put", "put_if_absent", "compare_and_swap", "upload"])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_object_whole(tmp_path: Path, operation: str) -> None:
    (tmp_path / "source").write_bytes(NEW)
    step, died = 0, True
    while died:
        step += 1
        root = tmp_path / f"killed-at-{step}"
        store = open_store(f"file://{root}", deadline=20)
        before: bytes | None = None
        version = None
        if operation != "put_if_absent":
            store.put("folder/k", OLD)
            before, version = store.get_versioned("folder/k")

        def work(store: Store = store, version: str | None = version) -> None:
            match operation:
                case "put":
                    store.put("folder/k", [NEW[:100], NEW[100:]])
                case "put_if_absent":
                    store.put_if_absent("folder/k", NEW)
                case "compare_and_swap":
                    store.compare_and_swap("folder/k", NEW, version)
                case "upload":
                    store.upload(tmp_path / "source", "folder/k")

        died = dies_at(step, work)
        keys = [info.key for info in store.list("")]
        assert keys in ([], ["folder/k"])
        content = store.get("folder/k") if keys else None
        assert content in ({before, NEW} if died else {NEW})
        fresh = open_store(f"file://{root}", deadline=20)  # a dead writer does not block the next one
        if content != NEW:
            assert fresh.compare_and_swap("folder/k", NEW, version)
        assert fresh.get("folder/k") == NEW
    assert step > 6
    assert unfinished(tmp_path / f"killed-at-{step}") == []


def test_old_files_of_a_killed_writer_are_removed(store: Store, root: Path) -> None:
    store.put("k", b"1")
    old, young = (root / ".holdfast" / "unfinished" / name for name in ("old", "young"))
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (1, 1))
    store.put("k", b"2")
    assert old.exists()  # checked once per store object
    open_store(f"file://{root}").put("k", b"3")
    assert unfinished(root) == [young]


def test_nothing_is_made_until_something_is_written(store: Store, root: Path) -> None:
    assert list(store.list("")) == []
    assert store.stat("k") is None
    store.delete("folder/k")
    assert not root.exists()


def test_a_listing_does_not_show_hidden_folders(store: Store, root: Path) -> None:
    store.compare_and_swap("k", b"1", None)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("x")
    assert [info.key for info in store.list("")] == ["k"]


def test_a_lock_held_by_a_stopped_process_ends_at_the_deadline(root: Path) -> None:
    store = open_store(f"file://{root}", deadline=0.2)
    version = store.compare_and_swap("k", b"1", None)
    (lock,) = (root / ".holdfast" / "locks").iterdir()
    with lock.open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with pytest.raises(StoreUnreachableError, match=r"compare_and_swap k: another process held .* for 0\.2 s"):
            store.compare_and_swap("k", b"2", version)
    assert store.compare_and_swap("k", b"2", version)
    assert unfinished(root) == []


def test_a_swap_waits_for_the_writer_before_it(store: Store, root: Path) -> None:
    version = store.compare_and_swap("k", b"1", None)
    (lock,) = (root / ".holdfast" / "locks").iterdir()
    swapped = threading.Event()

    def swap() -> None:
        store.compare_and_swap("k", b"2", version)
        swapped.set()

    with lock.open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        thread = threading.Thread(target=swap)
        thread.start()
        assert not swapped.wait(0.1)
    thread.join(180)
    assert swapped.is_set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    exit_code = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    ).returncode
    if exit_code != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_raises_no_space_error_and_leaves_no_partial_files(small_disk: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{small_disk}/store")
    version = store.compare_and_swap("k", OLD, None)
    large = bytes(2**21)
    (tmp_path / "source").write_bytes(large)
    for operation in (
        lambda: store.put("k", large),
        lambda: store.put_if_absent("other/new", large),
        lambda: store.compare_and_swap("k", large, version),
        lambda: store.upload(tmp_path / "source", "k"),
    ):
        with pytest.raises(NoSpaceError, match=r"No space left.*2097152 bytes to write, \d+ bytes free; free some"):
            operation()
        assert store.get("k") == OLD
        assert [info.key for info in store.list("")] == ["k"]
        assert unfinished(small_disk / "store") == []
    big = open_store(f"file://{tmp_path}/elsewhere")
    big.put("k", large)
    with pytest.raises(NoSpaceError, match=r"download k to .*free some"):
        big.download("k", small_disk / "target")
    assert [path.name for path in small_disk.iterdir()] == ["store"]
    store.put("k", NEW)


def test_a_limit_on_file_size_is_no_space_either(store: Store, root: Path) -> None:
    store.put("k", OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(NoSpaceError, match=r"put k in file://.*File too large"):
            store.put("k", NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.get("k") == OLD
    assert unfinished(root) == []


def test_a_read_only_disk_raises_access_denied_error(small_disk: Path) -> None:
    store = open_store(f"file://{small_disk}/store")
    store.put("k", OLD)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for operation in (lambda: store.put("k", NEW), lambda: store.delete("k")):
        with pytest.raises(AccessDeniedError, match=r"k in file://.*Read-only.*writable"):
            operation()
    assert store.get("k") == OLD


@pytest.mark.parametrize("below", ["", "/store"])
def test_a_root_that_is_a_file_is_named_by_every_operation(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(OLD)
    store = open_store(f"file://{file}{below}")
    operations: list[Callable[[], object]] = [
        lambda: store.put("k", NEW), lambda: store.put_if_absent("a/k", NEW), lambda: store.get("k"),
        lambda: store.compare_and_swap("k", NEW, None), lambda: list(store.list("")), lambda: store.stat("k"),
        lambda: list(store.folders("")),
    ]  # fmt: skip
    for operation in operations:
        with pytest.raises(SpecError, match=rf"{file} is a file and not a folder .*\n *remedy: name a folder"):
            operation()
    assert file.read_bytes() == OLD


def test_an_object_cannot_be_a_folder_too(store: Store) -> None:
    store.put("a", b"1")
    with pytest.raises(ConflictError, match=r"put a/b in .*cannot be an object and a folder"):
        store.put("a/b", b"2")
    store.put("c/d", b"3")
    with pytest.raises(ConflictError, match=r"put c in .*cannot be an object and a folder"):
        store.put("c", b"4")
    assert [info.key for info in store.list("")] == ["a", "c/d"]
    assert store.stat("c") is None
    assert store.stat("a/b") is None


def test_a_path_with_spaces_and_letters_of_all_kinds_round_trips(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/große Läufe%20")
    store.put("schlüssel/ü.json", b"1")
    reopened = open_store(store.url)
    assert [info.key for info in reopened.list("schl")] == ["schlüssel/ü.json"]
    shutil.rmtree(tmp_path / "große Läufe ")


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_an_object_is_on_the_disk_before_it_has_its_key_and_the_key_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    store, operations = open_store(f"file://{tmp_path}"), list[str]()
    sync, places = os.fsync, {"replace": os.replace, "link": os.link}

    def synced(descriptor: int) -> None:
        operations.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "bytes")
        sync(descriptor)

    def placed(name: str) -> Callable[..., None]:
        return lambda *paths, **more: operations.append("key") or places[name](*paths, **more)  # type: ignore[func-returns-value]

    monkeypatch.setattr(os, "fsync", synced)
    for name in places:
        monkeypatch.setattr(os, name, placed(name))
    getattr(store, operation)("runs/x/packs/p", b"bytes")
    first, last = operations.index("key"), len(operations) - operations[::-1].index("key") - 1
    assert "bytes" in operations[:first]
    assert "folder" in operations[last:]


@pytest.mark.parametrize("operation", ["put", "put_if_absent", "compare_and_swap", "put_stream"])
def test_each_new_folder_is_durable_before_an_object_in_it_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """After a power loss, a folder is gone with its content unless its parent was synced."""
    store, operations = open_store(f"file://{tmp_path}/new/root"), list[tuple[str, str]]()
    originals = {name: getattr(os, name) for name in ("mkdir", "fsync", "replace", "link")}

    def watched(name: str) -> Callable[..., object]:
        def act(first: object, *more: object, **options: object) -> object:
            result = originals[name](first, *more, **options)
            path = (
                str(Path(f"/proc/self/fd/{first}").readlink()) if name == "fsync" else str(more[0] if more else first)
            )
            operations.append((name, str(first) if name == "mkdir" else path))
            return result

        return act

    for name in originals:
        monkeypatch.setattr(os, name, watched(name))
    arguments: dict[str, tuple[object, ...]] = {
        "compare_and_swap": (b"bytes", None), "put_stream": (5, lambda: iter([b"bytes"])),
    }  # fmt: skip
    getattr(store, operation)("runs/x/packs/p", *arguments.get(operation, (b"bytes",)))
    monkeypatch.undo()
    placed_at = next(at for at, (name, path) in enumerate(operations) if path.endswith("/packs/p"))
    created_at = {path: at for at, (name, path) in enumerate(operations) if name == "mkdir"}
    assert {f"{tmp_path}/new", f"{tmp_path}/new/root", f"{tmp_path}/new/root/runs/x/packs"} <= created_at.keys()
    for folder, at in created_at.items():
        if at < placed_at:
            assert ("fsync", str(Path(folder).parent)) in operations[at:placed_at], folder
    assert any(name == "fsync" and path.endswith("/packs") for name, path in operations[placed_at:])


@pytest.mark.parametrize("name", ["link", "folder/link", ".holdfast/unfinished"])
@pytest.mark.parametrize("target", ["file", "folder"])
def test_no_operation_follows_a_link_below_the_root(root: Path, store: Store, name: str, target: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(OLD)
    os.utime(outside / "object", (0, 0))
    store.put("folder/own", NEW)
    if name.startswith("."):
        (root / name).rmdir()
    (root / name).symlink_to(outside if target == "folder" else outside / "object")
    key = f"{name}/object" if target == "folder" else name
    operations: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.stat(key),
        lambda: store.local_path(key),
        lambda: list(store.list("")),
        lambda: list(store.list(f"{name}/" if target == "folder" else name)),
        lambda: list(store.folders("folder/" if "/" in name else "")),
        lambda: store.put_if_absent(key, OLD),
        lambda: store.compare_and_swap(key, NEW, None),
        lambda: store.download(key, root.parent / "copy"),
    ]
    if target == "folder":
        operations += [lambda: store.put(key, NEW), lambda: store.delete(key)]
    if name.startswith("."):
        operations = [lambda: store.put("folder/new", NEW), lambda: store.end_abandoned("runs/", 0.0)]
    for operation in operations:
        with pytest.raises(DataError, match=rf"{root}/{name}: is a symbolic link.* replace it"):
            operation()
    assert (outside / "object").read_bytes() == OLD
    assert store.get("folder/own") == NEW
    (root / name).unlink()
    assert [info.key for info in store.list("")] == ["folder/own"]


def test_the_object_in_the_place_of_a_link_is_replaced_and_deleted_not_its_target(root: Path, store: Store) -> None:
    (root.parent / "outside").write_bytes(OLD)
    root.mkdir()
    for operation in (lambda: store.put("link", NEW), lambda: store.delete("link")):
        (root / "link").symlink_to(root.parent / "outside")
        operation()
        assert not (root / "link").is_symlink()
        (root / "link").unlink(missing_ok=True)
    assert (root.parent / "outside").read_bytes() == OLD
    linked = open_store(f"file://{root.parent}/alias")
    (root.parent / "alias").symlink_to(root)
    linked.put("a/b", NEW)
    assert [info.key for info in linked.list("")] == ["a/b"], "the root itself may be a link"
