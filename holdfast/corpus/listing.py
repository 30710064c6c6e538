"""Local files for a path, a folder or a glob, by one set of rules.

Links are followed, and a folder is read once, even if several links lead to it. So every listing ends. No entry is left
out silently: an entry that is not a file is listed by kind, and an unreadable folder is an error. Hidden entries (names
with a leading dot) are listed only if the pattern contains the dot.
"""

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
    """Names and paths of files, and other entries."""

    files: dict[str, Path] = field(default_factory=dict)  # by name
    others: dict[str, str] = field(default_factory=dict)  # kind of each other entry, by name

    def in_order(self) -> list[tuple[str, Path]]:
        """The files, by name."""
        return sorted(self.files.items())

    def left_out(self) -> dict[str, LeftOut]:
        """Other entries, by kind."""
        kinds: dict[str, list[str]] = {}
        for name, kind in sorted(self.others.items()):
            kinds.setdefault(kind, []).append(name.encode(errors="backslashreplace").decode())
        return {kind: LeftOut(count=len(names), example=names[0]) for kind, names in sorted(kinds.items())}

    def add(self, name: str, path: Path, folders: bool) -> None:
        """Add an entry. A folder is listed only with `folders`."""
        kind = kind_of(path)
        if kind == "file":
            self.files[name] = path
        elif kind == "folder":
            if folders:
                self.others[name] = NOT_ENTERED
        elif kind:
            self.others[name] = kind


def list_files(uri: str, root: Path, field: str) -> Listing:
    """The files for a path, a folder or a glob. Raises MissingError for no files, AccessDeniedError, DataError."""
    pattern = os.path.expanduser(uri.removeprefix("file://"))  # noqa: PTH111 - a pattern, not a path
    location = f"the working directory is {Path.cwd()}" if root == Path() else f"in {root}"
    listing = Listing()
    path = root / pattern
    kind = kind_of(path)
    if kind == "file":
        listing.files[pattern] = path
    elif kind == "folder":
        prefix = path.as_posix() if pattern.startswith("/") else path.relative_to(root).as_posix()
        _Walk(listing).expand("" if prefix == "." else f"{prefix}/", path, (RECURSIVE, "*"))
        if not listing.files:
            left_out = _in_words(listing)
            raise MissingError(f"{field}: the folder {uri!r} has no files ({location}){left_out}; put text into it")
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
            raise MissingError(f"{field}: {uri!r} matches no file ({location}){_in_words(listing)}; check the pattern")
    else:
        raise MissingError(f"{field}: {uri!r} does not exist ({location}); check the path")
    return listing


def kind_of(path: Path) -> str:
    """The kind of a path with links followed: `file`, `folder`, another kind, or an empty string if it does not
    exist. Raises AccessDeniedError and DataError."""
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
    return "".join(f"; left out, {kind}: {group.example}" for kind, group in listing.left_out().items())


class _Walk:
    """Expands a pattern."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def expand(self, prefix: str, folder: Path, parts: Sequence[str]) -> None:
        """Add the matches of the pattern's `parts` below a folder. Entries are named `prefix` plus their name."""
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
        """Match the entries of a folder. `walked` means that all folders among them are read anyway."""
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
        elif kind in (NO_TARGET, LINK_LOOP):  # it may have been meant as a link to a folder
            self._listing.others[name] = kind

    def _folders(self, prefix: str, top: Path) -> Iterator[tuple[str, Path, list[os.DirEntry[str]]]]:
        """A folder and all folders below it that are not hidden, each once with its entries. Real folders come
        before links."""
        visited: set[tuple[int, int]] = set()
        waiting, links = deque([(prefix, top)]), deque[tuple[str, Path]]()
        while waiting or links:
            is_link = not waiting
            name, path = (links if is_link else waiting).popleft()
            status = path.stat()
            if (identity := (status.st_dev, status.st_ino)) in visited:
                self._listing.others[name.rstrip("/")] = READ_ALREADY
                continue
            visited.add(identity)
            entries = _entries(path)
            yield name, path, entries
            for entry in entries:
                child = (f"{name}{entry.name}/", path / entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(child)
                elif entry.is_symlink() and kind_of(child[1]) == "folder":
                    links.append(child)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, by name. Raises AccessDeniedError and DataError."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        raise AccessDeniedError(
            f"{folder}: this folder may not be read; change its permissions, or leave it out of the pattern"
        ) from None
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its disk or mount") from None
