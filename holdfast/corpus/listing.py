"""The local files that a path, a folder or a glob means, by one set of rules.

Links are followed, and a folder is read once, however many links lead to it: so every listing ends. Promises that no
entry is left out without a word: what is no file is listed by kind, and a folder that may not be read is an error.
Hidden entries (a name that begins with a dot) are part of a listing only where the pattern writes the dot.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.dataset.manifest import LeftOut
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError

MAGIC = re.compile(r"[*?\[]")
RECURSIVE = "**"  # in a pattern: a folder and all folders below it

NO_TARGET = "link to nothing"
LINK_LOOP = "link that leads to itself"
READ_ALREADY = "link to a folder that is read already"
NOT_ENTERED = "folder that the pattern does not enter"
SPECIAL = {
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass
class Listing:
    """Names and paths of files, and of entries that are none."""

    files: dict[str, Path] = field(default_factory=dict)  # by name
    others: dict[str, str] = field(default_factory=dict)  # what each is, by name

    def in_order(self) -> list[tuple[str, Path]]:
        """The files, in the order of their names."""
        return sorted(self.files.items())

    def left_out(self) -> dict[str, LeftOut]:
        """What is no file, by what it is."""
        kinds: dict[str, list[str]] = {}
        for name, kind in sorted(self.others.items()):
            kinds.setdefault(kind, []).append(name.encode(errors="backslashreplace").decode())
        return {kind: LeftOut(count=len(names), example=names[0]) for kind, names in sorted(kinds.items())}

    def add(self, name: str, path: Path, folders: bool) -> None:
        """Note a file or what is none; a folder only with `folders`."""
        kind = kind_of(path)
        if kind == "file":
            self.files[name] = path
        elif kind == "folder":
            if folders:
                self.others[name] = NOT_ENTERED
        elif kind:
            self.others[name] = kind


def list_files(uri: str, root: Path, field: str) -> Listing:
    """The files that a path, a folder or a glob means. Raises MissingError for none, AccessDeniedError, DataError."""
    pattern = os.path.expanduser(uri.removeprefix("file://"))  # noqa: PTH111 - a pattern, not a path
    where = f"the working directory is {Path.cwd()}" if root == Path() else f"in {root}"
    listing = Listing()
    path = root / pattern
    kind = kind_of(path)
    if kind == "file":
        listing.files[pattern] = path
    elif kind == "folder":
        prefix = path.as_posix() if pattern.startswith("/") else path.relative_to(root).as_posix()
        _Walk(listing).expand("" if prefix == "." else f"{prefix}/", path, (RECURSIVE, "*"))
        if not listing.files:
            others = _in_words(listing)
            raise MissingError(f"{field}: the folder {uri!r} has no files ({where}){others}; put text into it")
    elif kind == NO_TARGET:
        raise MissingError(f"{field}: {uri!r} is a link to {path.readlink()}, which does not exist; check the link")
    elif kind:
        raise DataError(f"{field}: {uri!r} is a {kind} and not a file; write its data to a file, and name that")
    elif MAGIC.search(pattern):
        top, *rest = Path(pattern).parts if not pattern.endswith("/") else ("",)
        begin = (f"{top}", Path(top)) if top == "/" else ("", root)
        parts = tuple(rest) if top == "/" else (top, *rest)
        _Walk(listing).expand(*begin, parts)
        if not listing.files:
            raise MissingError(f"{field}: {uri!r} matches no file ({where}){_in_words(listing)}; check the pattern")
    else:
        raise MissingError(f"{field}: {uri!r} does not exist ({where}); check the path")
    return listing


def kind_of(path: Path) -> str:
    """What lies at a path, links followed: `file`, `folder`, another kind in words, or nothing. Raises
    AccessDeniedError."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return NO_TARGET if path.is_symlink() else ""
    except PermissionError:
        raise AccessDeniedError(f"{path}: may not be looked at; change the permissions of its folder") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return LINK_LOOP
        if error.errno == errno.ENAMETOOLONG:
            return ""
        raise DataError(f"{path}: cannot be looked at ({error.strerror}); check its disk or mount") from None
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else SPECIAL.get(stat.S_IFMT(mode), "special file")


def _in_words(listing: Listing) -> str:
    return "".join(f"; left out, {kind}: {one.example}" for kind, one in listing.left_out().items())


class _Walk:
    """Finds what a pattern means."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def expand(self, prefix: str, folder: Path, parts: Sequence[str]) -> None:
        """Add what `parts` of a pattern match below a folder, whose entries are named `prefix` and their own name."""
        part, *rest = parts
        if part == RECURSIVE:
            while rest and rest[0] == RECURSIVE:
                rest = rest[1:]
            for name, path, entries in self._folders(prefix, folder):
                self._match(name, path, entries, rest or ["*"], walked=True)
        elif MAGIC.search(part):
            self._match(prefix, folder, _entries(folder), parts)
        else:
            self._enter(prefix + part, folder / part, rest)

    def _match(
        self,
        prefix: str,
        folder: Path,
        entries: Sequence[os.DirEntry[str]],
        parts: Sequence[str],
        walked: bool = False,
    ) -> None:
        """`walked`: whether all folders among the entries are read anyway."""
        part, *rest = parts
        if not MAGIC.search(part):
            self._enter(prefix + part, folder / part, rest, walked)
            return
        fits = re.compile(fnmatch.translate(part)).match
        for entry in entries:
            if fits(entry.name) and (part.startswith(".") or not entry.name.startswith(".")):
                if not rest and entry.is_file(follow_symlinks=False):
                    self._listing.files[prefix + entry.name] = folder / entry.name
                else:
                    self._enter(prefix + entry.name, folder / entry.name, rest, walked)

    def _enter(self, name: str, path: Path, rest: Sequence[str], walked: bool = False) -> None:
        if not rest:
            self._listing.add(name, path, folders=not walked)
        elif (kind := kind_of(path)) == "folder":
            self.expand(f"{name}/", path, rest)
        elif kind in (NO_TARGET, LINK_LOOP):  # it may have been meant to lead to a folder
            self._listing.others[name] = kind

    def _folders(self, prefix: str, top: Path) -> Iterator[tuple[str, Path, list[os.DirEntry[str]]]]:
        """A folder and those below it that are not hidden, each once, with its entries. What is no link comes first."""
        seen: set[tuple[int, int]] = set()
        waiting, links = deque([(prefix, top)]), deque[tuple[str, Path]]()
        while waiting or links:
            is_link = not waiting
            name, path = (links if is_link else waiting).popleft()
            status = path.stat()
            if (identity := (status.st_dev, status.st_ino)) in seen:
                self._listing.others[name.rstrip("/")] = READ_ALREADY
                continue
            seen.add(identity)
            entries = _entries(path)
            yield name, path, entries
            for entry in entries:
                inside = (f"{name}{entry.name}/", path / entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(inside)
                elif entry.is_symlink() and kind_of(inside[1]) == "folder":
                    links.append(inside)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, in the order of the names. Raises AccessDeniedError."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        raise AccessDeniedError(
            f"{folder}: this folder may not be read; change its permissions, or leave it out of the pattern"
        ) from None
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its disk or mount") from None
