"""Inputs of a training script: files under a name, identified where a spec is read and fetched where the script runs.

The digest of an input is in the run id and on the command line of the ranks. A node accepts only files with this
digest. Local files stay where they are; those of a bucket or of the Hub are fetched once per node.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel

from holdfast.model.hub import SCHEME, Kind, fetch_files, is_hub, parse_place, repository_files
from holdfast.runtime.environment import cache_dir, make_folder
from holdfast.runtime.locks import holding_lock
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, HoldfastError, MissingError, Problem, SpecError
from holdfast.spec.json_parsing import parse_json
from holdfast.spec.script import ScriptInput
from holdfast.store.json_reading import read_file_bounded
from holdfast.store.open import in_bucket, local_folder, open_store
from holdfast.store.payload import check_key

MAX_FILES = 1_000_000  # of one input
MAX_RECORD = 256 * 2**20  # bytes of the record of a fetched input
LOCK_SECONDS = 12 * 3600.0  # another rank of the node may be fetching
_DATASETS = f"{SCHEME}datasets/"


@dataclass(frozen=True)
class _InputFile:
    """A file of an input. A single file has the path of its name."""

    path: str  # relative, with `/`
    size: int  # bytes
    digest: str


@dataclass(frozen=True)
class _InputListing:
    """The files of an input where it is now. `uri` names the commit, if it is on the Hub."""

    uri: str
    files: tuple[_InputFile, ...]

    @property
    def digest(self) -> str:
        """The digest of the content."""
        lines = (f"{file.path}\0{file.size}\0{file.digest}\n" for file in self.files)
        return blake3("".join(lines).encode(errors="surrogateescape")).hexdigest()


class InputPlace(BaseModel, extra="forbid", frozen=True):
    """An input as the command line of a rank names it."""

    uri: str
    digest: str


def resolve_inputs(spec: Spec, folder: Path) -> Spec:
    """The spec with the digests of its script's inputs. Paths are relative to `folder`, and become absolute. Inputs
    that have a digest stay as they are. Raises SpecError that names every input that cannot be read."""
    problems, inputs = list[Problem](), list[ScriptInput]()
    for number, given in enumerate(spec.train.inputs):
        if given.digest is not None:
            inputs.append(given)
            continue
        try:
            listing = _list(_absolute(given.uri, folder))
        except HoldfastError as error:
            remedy = "correct the path, which is relative to the spec, or put the files into a bucket"
            problems.append(Problem(f"train.inputs.{number}.uri", given.uri, f"cannot be read: {error}", remedy))
        else:
            inputs.append(given.model_copy(update={"uri": listing.uri, "digest": listing.digest}))
    if problems:
        raise SpecError(problems)
    if tuple(inputs) == spec.train.inputs:
        return spec
    return spec.model_copy(update={"train": spec.train.model_copy(update={"inputs": tuple(inputs)})})


def fetch_inputs(given: str) -> dict[str, Path]:
    """The paths of the inputs that the command line of a rank names, by name. Raises what `fetch_input` raises."""
    places = parse_json(given or "{}", dict[str, InputPlace], "--inputs")
    return {name: fetch_input(name, place.uri, place.digest) for name, place in places.items()}


def fetch_input(name: str, uri: str, digest: str, cache: Path | None = None) -> Path:
    """The path of an input on this node: a file, or a folder. It is fetched, and its digest computed, once per node,
    and again after a change. Raises MissingError if it is not there, and DataError for other content."""
    root = (cache or cache_dir()) / "inputs"
    key = blake3(f"{uri}\0{digest}".encode()).hexdigest()[:32]
    record = root / f"{key}.json"
    make_folder(root)
    with holding_lock(root / f"{key}.lock", LOCK_SECONDS, "fetches the input"):
        if (known := _recorded(record)) is not None:
            return known
        if record.exists():  # its files were changed
            shutil.rmtree(root / key, ignore_errors=True)
        listing = _list(uri)
        if listing.digest != digest:
            raise DataError(
                f"input {name}: {uri} has other content ({listing.digest[:16]}) than the run id was made from "
                f"({digest[:16]}). Put the files back, or run the spec again, which is another run"
            )
        path = _place(listing, root / key)
        _record(record, path, listing)
        return path


def _absolute(uri: str, folder: Path) -> str:
    """The URI, with an absolute path if it is one."""
    if in_bucket(uri) or is_hub(uri):
        return uri
    path = Path(uri.removeprefix("file://")).expanduser()
    return os.path.normpath((folder / path).absolute())


def _list(uri: str) -> _InputListing:
    """The files of an input. Raises MissingError if there are none."""
    if is_hub(uri):
        listing = _list_hub(uri)
    elif in_bucket(uri):
        listing = _InputListing(uri, tuple(_list_bucket(uri)))
    else:
        listing = _InputListing(uri, tuple(_list_local(Path(uri))))
    if not listing.files:
        raise MissingError(f"{uri}: has no files; hidden files do not count")
    if len(listing.files) > MAX_FILES:
        raise DataError(f"{uri}: has more than {MAX_FILES:,} files; pack them into fewer")
    return listing


def _list_local(path: Path) -> Iterator[_InputFile]:
    if path.is_file():
        yield _InputFile(path.name, path.stat().st_size, _digest(path))
        return
    if not path.exists():
        raise MissingError(f"{path}: does not exist on this machine")
    for name, file in _visible(path):
        yield _InputFile(name, file.stat().st_size, _digest(file))


def _visible(folder: Path) -> list[tuple[str, Path]]:
    """The files of a folder by their relative names, without hidden ones."""
    files = [(file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if file.is_file()]
    return sorted((name, file) for name, file in files if _is_visible(name))


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/"))


def _digest(path: Path) -> str:
    try:
        return blake3().update_mmap(path).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _bucket(uri: str) -> tuple[str, str]:
    """The bucket's URL, and the key or prefix."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    try:
        check_key(key.rstrip("/"))
    except ValueError as error:
        raise DataError(f"{uri}: {error}; write {scheme}://bucket/key, or {scheme}://bucket/prefix") from None
    return f"{scheme}://{bucket}", key.rstrip("/")


def _list_bucket(uri: str) -> Iterator[_InputFile]:
    """The objects of a key or a prefix, with their versions."""
    url, key = _bucket(uri)
    store = open_store(url)
    if (info := store.stat(key)) is not None:
        yield _InputFile(key.rpartition("/")[2], info.size, str(info.version))
        return
    for info in store.list(f"{key}/"):
        name = info.key.removeprefix(f"{key}/")
        if not name.endswith("/") and name and _is_visible(name):  # consoles mark folders by such names
            yield _InputFile(name, info.size, str(info.version))


def _list_hub(uri: str) -> _InputListing:
    """The files of a repository at the commit that its revision names now, and the URI with that commit."""
    prefix, kind = _kind_of(uri)
    place = parse_place(f"{SCHEME}{uri.removeprefix(prefix)}")
    commit, found = repository_files(place.repository, place.revision, kind)
    inside = place.path.rstrip("/")
    files = []
    for file in found:
        name = file.path.removeprefix(f"{inside}/") if inside else file.path
        if inside and file.path == inside:
            name = inside.rpartition("/")[2]
        elif inside and name == file.path:
            continue
        if _is_visible(name):
            files.append(_InputFile(name, file.size, file.digest))
    path = f"/{inside}" if inside else ""
    return _InputListing(f"{prefix}{place.repository}@{commit}{path}", tuple(files))


def _kind_of(uri: str) -> tuple[str, Kind]:
    """The prefix of an address on the Hub, and the kind of its repository."""
    return (_DATASETS, "dataset") if uri.startswith(_DATASETS) else (SCHEME, "model")


def _place(listing: _InputListing, folder: Path) -> Path:
    """The path of a listed input on this node, after fetching it."""
    uri = listing.uri
    if is_hub(uri):
        prefix, kind = _kind_of(uri)
        place = parse_place(f"{SCHEME}{uri.removeprefix(prefix)}")
        names = [file.path for file in listing.files]
        path = fetch_files(place, names, kind)
        if damaged := _damaged(listing, path):
            for file in damaged:
                file.resolve().unlink(missing_ok=True)
                file.unlink(missing_ok=True)
            path = fetch_files(place, names, kind)
            if damaged := _damaged(listing, path):
                raise DataError(f"{uri}: {damaged[0].name} has other bytes than the Hub lists; run again later")
        return path
    if not in_bucket(uri):
        return Path(uri)
    url, key = _bucket(uri)
    store = open_store(url)
    if store.stat(key) is None:
        path = local_folder(store, key, folder, _is_visible) or folder  # emptied since: `_record` finds no files
    else:
        path = folder / listing.files[0].path
        store.download(key, path)
    if tuple(_list_bucket(uri)) != listing.files:
        shutil.rmtree(folder, ignore_errors=True)
        raise _changed(uri)
    return path


def _damaged(listing: _InputListing, path: Path) -> list[Path]:
    """The files of a fetched repository that do not have the digests that the Hub lists."""
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    damaged = []
    for listed in listing.files:
        file = path if path.is_file() else path / listed.path
        algorithm, _, expected = listed.digest.partition(":")
        with file.open("rb") as stream:
            found = sha_fileobj(stream).hex() if algorithm == "sha256" else git_hash(stream.read())
        if found != expected:
            damaged.append(file)
    return damaged


def _changed(uri: str) -> DataError:
    return DataError(f"{uri}: changed while it was read; run again when no process writes to it")


# What this node has fetched or hashed before: the path, and the size and time of each file


class _FetchedInput(BaseModel, extra="forbid", frozen=True):
    path: str
    single: bool  # a file, not a folder
    files: dict[str, tuple[int, int]]  # size in bytes and time of the last change in nanoseconds, by name


def _stamps(path: Path, single: bool) -> dict[str, tuple[int, int]]:
    files = [(path.name, path)] if single else _visible(path)
    return {name: (status.st_size, status.st_mtime_ns) for name, file in files for status in [file.stat()]}


def _recorded(record: Path) -> Path | None:
    """The path in the record of an input, if its files did not change since."""
    try:
        found = _FetchedInput.model_validate_json(read_file_bounded(record, MAX_RECORD))
        path = Path(found.path)
        return path if _stamps(path, found.single) == found.files else None
    except (HoldfastError, ValueError, OSError):
        return None


def _record(record: Path, path: Path, listing: _InputListing) -> None:
    single = path.is_file()
    found = _FetchedInput(path=str(path), single=single, files=_stamps(path, single))
    if sorted(found.files) != sorted(file.path for file in listing.files):
        raise _changed(listing.uri)
    with tempfile.NamedTemporaryFile("w", dir=record.parent, prefix=".record-", delete=False) as written:
        written.write(found.model_dump_json())
    Path(written.name).replace(record)
