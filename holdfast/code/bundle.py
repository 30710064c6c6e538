"""Bundle of a user's code: the files of a folder as one object, named by the digest of its bytes.

Equal files give equal bytes, on every machine. A bundle is made where a run is submitted, and is unpacked once per node
into a folder that nothing writes to. Write access to the store cannot change what runs, because the digest of the
bundle comes from the command line of the job.

The format is a line of canonical JSON that lists the files, and then their contents. It has no times and no owners.
"""

import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, Field

from holdfast.code.packages import LOCK_FILE, locked_packages, require_packages
from holdfast.runtime.environment import cache_dir, make_folder
from holdfast.runtime.locks import holding_lock
from holdfast.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.redaction import names_secret
from holdfast.spec.redaction.patterns import PEM, SHAPES, name_strength
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_file_bounded

log = logging.getLogger("holdfast.code")

MAX_FILES = 2000
MAX_BYTES = 16 * 2**20  # of all contents
MAX_LISTING = 4 * 2**20  # bytes of the line that lists the files
MAX_ENTRIES = 50_000  # files and folders that are looked at; a home folder has more
MAX_PATH = 512  # characters
LOCK_SECONDS = 120.0
DIGEST = re.compile(r"blake3:[0-9a-f]{64}")
IGNORE_FILE = ".holdfastignore"
CODE = "*.py"

# File names of secrets, in addition to those that `names_secret` knows.
_SECRET_FILES = (
    ".env .env.* *.env *.pem *.key *.p12 *.pfx *.jks *.kdbx id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc _netrc "
    ".pypirc .npmrc .git-credentials credentials credentials.* kubeconfig kubeconfig.* *.kubeconfig"
).split()
# Modules of the standard library that nothing here imports. Files with these names shadow nothing.
_UNUSED_MODULES = frozenset("antigravity idlelib lib2to3 test this tkinter turtle turtledemo".split())


@dataclass(frozen=True)
class CodeFile:
    """A file of a bundle."""

    path: str  # relative, with `/`
    data: bytes
    executable: bool = False


@dataclass(frozen=True)
class Bundle:
    """The files of a folder, packed."""

    data: bytes
    paths: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The name of the bundle: `blake3:` and 64 hexadecimal digits."""
        return digest_of(self.data)


class _Entry(BaseModel, extra="forbid", frozen=True, strict=True):
    """A file in the listing of a bundle."""

    path: str
    size: int = Field(ge=0)
    executable: bool
    digest: str


class _Listing(BaseModel, extra="forbid", frozen=True, strict=True):
    """The first line of a bundle."""

    version: int
    files: list[_Entry]


def digest_of(data: bytes) -> str:
    """The digest of a bundle's bytes, as a spec and a command line carry it."""
    return f"blake3:{blake3(data).hexdigest()}"


def make_bundle(folder: Path, include: Sequence[str] = ()) -> Bundle:
    """The bundle of `folder`: its `*.py` files, its lock, and files that match a pattern of `include`.

    `*` in a pattern also matches `/`. Hidden folders, caches, virtual environments and what `.holdfastignore` names
    are left out. Raises MissingError without the folder, and SpecError with every file that is refused.
    """
    if not folder.is_dir():
        raise MissingError(f"{folder}: no such folder of code; name a file in an existing folder")
    problems: list[Problem] = []
    files, size = list[CodeFile](), 0
    for file in _collect(folder, [CODE, LOCK_FILE, *include], problems):
        files.append(file)
        size += len(file.data)
        if len(files) > MAX_FILES or size > MAX_BYTES:  # the rest is not read
            break
    if len(files) > MAX_FILES:
        problems.append(_refused(str(folder), f"has more than {MAX_FILES:,} files of code", _LEAVE_OUT))
    if size > MAX_BYTES:
        largest = max(files, key=lambda file: len(file.data)).path
        text = f"has more than {MAX_BYTES:,} bytes of code; the largest file is {largest}"
        problems.append(_refused(str(folder), text, _LEAVE_OUT))
    lock = next((file.data for file in files if file.path == LOCK_FILE), b"")
    problems += locked_packages(lock.decode("utf-8-sig", errors="replace"))[1]
    if problems:
        raise SpecError(problems, str(folder))
    return Bundle(pack(files), tuple(file.path for file in files))


def pack(files: Iterable[CodeFile]) -> bytes:
    """The bytes of a bundle. They depend on the files only, not on their order."""
    ordered = sorted(files, key=lambda file: file.path.encode())
    entries = [
        {
            "path": file.path,
            "size": len(file.data),
            "executable": file.executable,
            "digest": blake3(file.data).hexdigest(),
        }
        for file in ordered
    ]
    listing = json.dumps({"version": 1, "files": entries}, sort_keys=True, separators=(",", ":"))
    return b"".join([listing.encode(), b"\n", *(file.data for file in ordered)])


def read_bundle(data: bytes, digest: str) -> list[CodeFile]:
    """The files of a bundle with this digest. Raises DataError for other bytes, and for a listing that could write
    outside of a folder."""
    require_digest(digest)
    if (actual := digest_of(data)) != digest:
        raise DataError(
            f"the code bundle has the digest {actual}, and the job asks for {digest}: it was changed; submit the run "
            "again from the folder of the code"
        )
    end = data.find(b"\n", 0, MAX_LISTING)
    listing = parse_json(data[: max(end, 0)], _Listing, f"code bundle {digest}", "make it again")
    if listing.version != 1:
        raise DataError(f"code bundle {digest}: has version {listing.version}; use the Holdfast that made it")
    files, at = [], end + 1
    if len(listing.files) > MAX_FILES or sum(entry.size for entry in listing.files) != len(data) - at:
        raise DataError(f"code bundle {digest}: does not have the files that it lists; make it again")
    if len(data) - at > MAX_BYTES:
        raise DataError(f"code bundle {digest}: has {len(data) - at:,} bytes, more than {MAX_BYTES:,}")
    _require_safe([entry.path for entry in listing.files], digest)
    for entry in listing.files:
        content = data[at : at + entry.size]
        if blake3(content).hexdigest() != entry.digest:
            raise DataError(f"code bundle {digest}: the content of {entry.path} is not the one that it lists")
        files.append(CodeFile(entry.path, content, entry.executable))
        at += entry.size
    return files


def require_digest(digest: str) -> None:
    """Raises DataError if `digest` is not `blake3:` and 64 hexadecimal digits."""
    if not DIGEST.fullmatch(digest):
        raise DataError(f"{digest[:100]!r} is no digest of a code bundle; it is blake3: and 64 hexadecimal digits")


def publish(store: Store, bundle: Bundle) -> str:
    """Put a bundle into the store, if it is not there. Returns its digest."""
    digest = bundle.digest
    key = layout.code(digest)
    if not store.put_if_absent(key, bundle.data):
        log.warning("%s/%s: has other bytes than its name says; it is replaced", store.url, key)
        store.put(key, bundle.data)
    return digest


def fetch_code(store: Store, digest: str, cache: Path | None = None) -> Path:
    """The folder with the files of a bundle on this node. It is read from the store once per node.

    `digest` must come from the command line of the job, not from the store. Raises MissingError if the store has no
    such bundle, DataError if it was changed, and SpecError if this environment has other packages than its lock.
    """
    require_digest(digest)
    root = (cache or cache_dir()) / "code"
    folder = root / digest.partition(":")[2]
    make_folder(root)
    with holding_lock(root / f"{folder.name}.lock", LOCK_SECONDS, "unpacks the code"):
        if folder.is_dir():
            if _is_intact(folder, digest):
                require_packages(folder)
                return folder
            log.warning("%s: was changed; it is unpacked again", folder)
        key = layout.code(digest)
        try:
            data = store.get(key, most=MAX_BYTES + MAX_LISTING)
        except MissingError:
            raise MissingError(
                f"{store.url}/{key}: the code bundle of this run is not in the store; submit the run again"
            ) from None
        _unpack(read_bundle(data, digest), folder)
    require_packages(folder)
    return folder


def _unpack(files: Sequence[CodeFile], folder: Path) -> None:
    """Write the files into a new folder, which appears when it is whole. Nothing in it is writable. A folder that was
    changed is replaced: other processes may import from it."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
    try:
        for file in files:
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(0o555 if file.executable else 0o444)
        for below, _, _ in os.walk(partial):
            Path(below).chmod(0o555)
        if folder.exists():
            changed = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
            folder.rename(changed)
            partial.rename(folder)
            _remove(changed)
        else:
            partial.rename(folder)
    except BaseException:
        _remove(partial)
        raise


def _is_intact(folder: Path, digest: str) -> bool:
    """Whether a folder has exactly the files of the bundle. Reads no more than a bundle may have."""
    files: list[CodeFile] = []
    left = MAX_BYTES
    for below, folders, names in os.walk(folder):
        if len(files) + len(names) > MAX_FILES or any((Path(below) / name).is_symlink() for name in (*folders, *names)):
            return False
        for name in names:
            path = Path(below) / name
            try:
                data = read_file_bounded(path, left)
            except (DataError, MissingError):  # too large, no regular file, or without permission to read
                return False
            left -= len(data)
            executable = bool(path.stat().st_mode & stat.S_IXUSR)
            files.append(CodeFile(path.relative_to(folder).as_posix(), data, executable))
    return digest_of(pack(files)) == digest


def _remove(folder: Path) -> None:
    for below, _, _ in os.walk(folder):
        Path(below).chmod(0o755)
    shutil.rmtree(folder)


# What becomes part of a bundle, and what is refused

_LEAVE_OUT = f"keep only the code of the run in this folder, or name what to leave out in {IGNORE_FILE}"


def _refused(path: str, message: str, remedy: str) -> Problem:
    return Problem("code", path, message, remedy)


def _collect(folder: Path, patterns: Sequence[str], problems: list[Problem]) -> Iterator[CodeFile]:
    """The files of a folder that match a pattern. Appends a problem for each file that may not travel."""
    ignored = _ignored(folder)
    looked_at = 0
    for below, folders, names in os.walk(folder):
        here = Path(below)
        looked_at += len(folders) + len(names)
        if looked_at > MAX_ENTRIES:
            problems.append(_refused(str(folder), f"has more than {MAX_ENTRIES:,} files and folders", _LEAVE_OUT))
            return
        kept = []
        for name in sorted(folders):
            path = (here / name).relative_to(folder).as_posix()
            if _is_no_code(here / name) or _matches(path, ignored):
                continue
            if (here / name).is_symlink():
                remedy = f"copy it into the folder, or name it in {IGNORE_FILE}"
                problems.append(_refused(path, "is a link to a folder, which a bundle does not follow", remedy))
                continue
            kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            path = (here / name).relative_to(folder).as_posix()
            if not _matches(path, patterns) or _matches(path, ignored):
                continue
            if (file := _read(folder, path, problems)) is not None:
                yield file


def _read(folder: Path, path: str, problems: list[Problem]) -> CodeFile | None:
    """A file for a bundle, or None after appending why it is refused."""
    full = folder / path
    leave_out = f"name it in {IGNORE_FILE} if the run does not need it"
    if not full.resolve().is_relative_to(folder.resolve()):
        problems.append(_refused(path, "is a link out of the folder", f"copy the file into it, or {leave_out}"))
    elif _names_secret(path) or (full.is_symlink() and _names_secret(full.resolve().as_posix())):
        remedy = "pass secrets in the environment (docs/security.md), and rename the file or leave it out"
        problems.append(_refused(path, "has a name of secrets", remedy))
    elif (fault := _path_fault(path)) is not None:
        problems.append(_refused(path, fault, f"rename it, or {leave_out}"))
    elif (module := path.removesuffix(".py").removesuffix("/__init__")) in _STANDARD and path != module:
        whose = "the" if module in _PACKAGES else "Python's own"
        message = f"has the name of {whose} module {module!r}, which it would replace"
        problems.append(_refused(path, message, "rename it"))
    else:
        try:
            data = read_file_bounded(full, MAX_BYTES)
        except (DataError, MissingError) as error:
            problems.append(_refused(path, f"cannot be read: {error}", leave_out))
            return None
        text = data.decode(errors="replace")
        if (found := PEM.search(text) or SHAPES.search(text)) is not None:
            line = text.count("\n", 0, found.start()) + 1
            remedy = "read it from an environment variable (docs/security.md)"
            problems.append(_refused(path, f"contains what looks like a key, in line {line}", remedy))
            return None
        return CodeFile(path, data, bool(full.stat().st_mode & stat.S_IXUSR))
    return None


_PACKAGES = frozenset({"holdfast", "torch", "numpy"})
_STANDARD = (sys.stdlib_module_names | _PACKAGES) - _UNUSED_MODULES


def _ignored(folder: Path) -> list[str]:
    """The patterns of `.holdfastignore`: one per line, `#` begins a comment."""
    file = folder / IGNORE_FILE
    if not file.is_file():
        return []
    lines = read_file_bounded(file, 2**20).decode(errors="replace").splitlines()
    return [line.strip().strip("/") for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, or its last part, or a folder that it is in, matches a pattern."""
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(path, pattern) or fnmatchcase(name, pattern) or path.startswith(f"{pattern}/")
        for pattern in patterns
    )


def _is_no_code(folder: Path) -> bool:
    """Whether a folder is hidden, a cache, or an environment of Python."""
    name = folder.name
    return (
        name.startswith(".")
        or name in ("__pycache__", "node_modules", "site-packages")
        or name.endswith(".egg-info")
        or (folder / "pyvenv.cfg").exists()
    )


def _names_secret(path: str) -> bool:
    name = path.rpartition("/")[2]
    stem = name.lstrip(".").partition(".")[0]
    known = any(fnmatchcase(name.lower(), pattern) for pattern in _SECRET_FILES)
    return known or (name_strength(stem) == 2 if name.endswith(".py") else names_secret(stem))


def _path_fault(path: str) -> str | None:
    """Why a path may not be in a bundle, or None."""
    parts = path.split("/")
    if len(path) > MAX_PATH:
        return f"is longer than {MAX_PATH} characters"
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or ":" in path:
        return "is no relative path"
    if not path.isprintable() or unicodedata.normalize("NFC", path) != path:
        return "has characters that not every system keeps"
    return None


def _require_safe(paths: Sequence[str], digest: str) -> None:
    """Raises DataError unless the paths are distinct files of one folder."""
    seen: set[str] = set()
    folders = {"/".join(parts[:end]) for path in paths for parts in [path.split("/")] for end in range(1, len(parts))}
    for path in paths:
        fault = _path_fault(path)
        if fault is None and (path in seen or path in folders):
            fault = "is listed twice, or is a file and a folder"
        if fault is not None:
            raise DataError(f"code bundle {digest}: the path {path[:100]!r} {fault}")
        seen.add(path)
