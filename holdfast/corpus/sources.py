"""Sources of a spec: their files, each with a digest of its content, and their lineage.

Local bytes are hashed (blake3, in parallel threads). S3 objects are identified by their ETag and DVC files by the hash
that DVC or the Hub tracks, so none is downloaded to identify a dataset. `records` reads the content of files.

Datasets of the Hugging Face Hub are `hf://datasets/owner/name[@revision][/path-or-glob]`. The revision is resolved to a
commit once. All files are of that commit, with the digests that the Hub keeps. A file is fetched whole, into the cache
of the machine that reads it.
"""

import fnmatch
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from blake3 import blake3

from holdfast.corpus.files import (
    Format,
    SourceFile,
    advice,
    bucket_store,
    digest_of,
    dvc_filesystem,
    local_stamp,
    suffixes,
)
from holdfast.corpus.listing import MAGIC, Listing, list_files
from holdfast.dataset.manifest import LeftOut, Lineage
from holdfast.model.hub import SCHEME, RepositoryFile, parse_place, repository_files
from holdfast.spec.data import Data, Source
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError
from holdfast.store import in_bucket
from holdfast.store.payload import check_key, check_prefix

HASH_THREADS = 8
# Excluded: not library code (tests, some not decodable on purpose), not Python's own, or different between machines.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
DATASETS = f"{SCHEME}datasets/"
TRAIN = re.compile(r"(?:^|[^a-z0-9])train(?:ing)?(?:[^a-z0-9]|$)", re.IGNORECASE)  # in a name, as `datasets` has it
OTHER_SPLIT = "file of another split than train"
NOT_DATA = "file that is not parquet or jsonl"


@dataclass(frozen=True)
class HubDataset:
    """The files of a source on the Hub, with the commit that they are of."""

    repository: str
    commit: str
    files: list[SourceFile]
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def hub_dataset(source: Source, named: str, wanted: Format | Literal["auto"]) -> HubDataset:
    """The files that a source names. Without a path these are the parquet and jsonl files of the repository, and only
    those of the training split if names tell splits apart. Raises MissingError, DataError, AccessDeniedError and
    StoreUnreachableError."""
    try:
        place = parse_place(f"{SCHEME}{source.uri.removeprefix(DATASETS)}")
    except DataError:
        raise DataError(f"{named}: {source.uri!r} is not {DATASETS}owner/name[@revision][/path-or-glob]") from None
    commit, listed = repository_files(place.repository, place.revision, "dataset")
    visible = [file for file in listed if not any(part.startswith(".") for part in file.path.split("/"))]
    chosen, left_out = _whole(visible) if not place.path else (_matching(visible, place.path), {})
    if not chosen:
        names = ", ".join(file.path for file in visible[:10])
        problem = f"matches {place.path!r}" if place.path else "is parquet or jsonl"
        raise MissingError(f"{named}: no file of {source.uri} {problem}; name one or a glob of its files: {names}")
    files = [_file(file, place.repository, commit, wanted) for file in chosen]
    return HubDataset(place.repository, commit, files, left_out)


def _whole(listed: list[RepositoryFile]) -> tuple[list[RepositoryFile], dict[str, LeftOut]]:
    data = [file for file in listed if _is_data(file.path)]
    train = [file for file in data if TRAIN.search(file.path)]
    chosen = train or data
    left: dict[str, LeftOut] = {}
    for kind, others in (
        (NOT_DATA, [file for file in listed if file not in data]),
        (OTHER_SPLIT, [file for file in data if file not in chosen]),
    ):
        if others:
            left[kind] = LeftOut(count=len(others), example=others[0].path)
    return chosen, left


def _is_data(path: str) -> bool:
    return suffixes(path, "auto")[0] in ("parquet", "jsonl")


def _matching(listed: list[RepositoryFile], pattern: str) -> list[RepositoryFile]:
    """The files of a path, of a folder, or of a glob, in which `*` also matches `/`."""
    if MAGIC.search(pattern):
        matches = re.compile(fnmatch.translate(pattern)).match
        return [file for file in listed if matches(file.path)]
    return [file for file in listed if file.path == pattern or file.path.startswith(pattern.rstrip("/") + "/")]


def _file(file: RepositoryFile, repository: str, commit: str, wanted: Format | Literal["auto"]) -> SourceFile:
    format_, compression = suffixes(file.path, wanted)
    return SourceFile(
        name=f"{DATASETS}{repository}@{commit[:10]}/{file.path}",
        kind="hub",
        root=repository,
        path=file.path,
        digest=file.digest,
        size=file.size,
        stamp=commit,
        format=format_,
        compression=compression,
    )


@dataclass(frozen=True)
class ResolvedSource:
    """A source, with its files in the order of their documents in the dataset."""

    source: Source
    files: tuple[SourceFile, ...]
    lineage: Lineage


def resolve(data: Data) -> list[ResolvedSource]:
    """Find and digest the files of each source. Raises MissingError for a source without files, AccessDeniedError,
    DataError."""
    resolved = [_resolve(source, f"data.sources.{index}.uri") for index, source in enumerate(data.sources)]
    if data.cleaning.on_bad_record == "fail":
        for file in (file for source in resolved for file in source.files if file.format == "other"):
            raise DataError(f"{file.name}: {advice(file.path)}, or set data.cleaning.on_bad_record: skip")
    return resolved


def missing_sources(data: Data) -> list[str]:
    """A sentence about each source that names no file on this machine. Buckets and repositories are not asked."""
    problems = []
    for index, source in enumerate(data.sources):
        if "://" in source.uri.removeprefix("file://") or source.uri.startswith(("dvc:", "python:")):
            continue
        try:
            list_files(_both_files(source).uri, Path(), f"data.sources.{index}.uri")
        except (MissingError, AccessDeniedError, DataError) as error:
            problems.append(str(error))
    return problems


def _resolve(source: Source, field: str) -> ResolvedSource:
    source = _both_files(source)
    if in_bucket(source.uri):
        files, lineage = _bucket(source, field), _Origin("s3")
    elif source.uri.startswith("dvc:"):
        files, lineage = _dvc(source, field)
    elif source.uri.startswith(DATASETS):
        found = hub_dataset(source, field, _format(source))
        files, lineage = found.files, _Origin("hub", found.repository, found.commit, left_out=found.left_out)
    elif source.uri.startswith(SCHEME):
        raise DataError(f"{field}: {source.uri!r} is no dataset; write {DATASETS}owner/name[@revision][/path-or-glob]")
    elif source.uri == "python:stdlib":
        files, lineage = _local(_stdlib(field), source), _Origin("python", revision=platform.python_version())
    elif source.uri.startswith("python:"):
        raise MissingError(f"{field}: {source.uri!r} is not known; the only Python source is python:stdlib")
    else:
        files, lineage = _listed(list_files(source.uri, Path(), field), source, _Origin("files"))
    if not files:
        raise MissingError(f"{field}: {source.uri!r} has no files; check the path and the pattern")
    return ResolvedSource(source, tuple(files), _lineage(lineage, files))


def _both_files(source: Source) -> Source:
    """The source; one of Megatron that is named by its prefix, or by one of its files, with a pattern of both."""
    if source.format != "megatron" or MAGIC.search(source.uri) or Path(source.uri).expanduser().is_dir():
        return source
    return source.model_copy(update={"uri": re.sub(r"\.(bin|idx)$", "", source.uri) + ".[bi][id][nx]"})


@dataclass(frozen=True)
class _Origin:
    kind: Any
    repository: str | None = None
    revision: str | None = None
    hash: str | None = None
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def _lineage(origin: _Origin, files: list[SourceFile]) -> Lineage:
    digest = blake3()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.digest}\n".encode(errors="surrogateescape"))
    return Lineage(
        kind=origin.kind,
        files=len(files),
        bytes=sum(file.size for file in files),
        digest=digest.hexdigest(),
        repository=origin.repository,
        revision=origin.revision,
        hash=origin.hash,
        left_out=origin.left_out,
    )


def _listed(listing: Listing, source: Source, origin: _Origin) -> tuple[list[SourceFile], _Origin]:
    return _local(listing.in_order(), source), replace(origin, left_out=listing.left_out())


def _stdlib(field: str) -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not NOT_STDLIB.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    if not files:
        raise MissingError(
            f"{field}: this Python keeps no source of its standard library in {root}; use another Python"
        )
    return files


def _format(source: Source) -> Format | Literal["auto"]:
    """The format of a source's files. A reader of user code gets whole files, of any name."""
    return "text" if source.reader is not None else source.format


def _local(found: Iterable[tuple[str, Path]], source: Source) -> list[SourceFile]:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(lambda item: _digested(item[0], item[1], source), found))


def _digested(name: str, path: Path, source: Source) -> SourceFile:
    format_, compression = suffixes(name, _format(source))
    try:
        stamp = local_stamp(path)
        size = path.stat().st_size
        digest = digest_of(path)
    except PermissionError:
        raise AccessDeniedError(f"{path}: may not be read; change its permissions") from None
    except FileNotFoundError:
        raise MissingError(f"{path}: went away while it was being read; run again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its disk or mount") from None
    return SourceFile(
        name=name,
        kind="local",
        root="",
        path=str(path.absolute()),
        digest=digest,
        size=size,
        stamp=stamp,
        format=format_,
        compression=compression,
    )


def _bucket(source: Source, field: str) -> list[SourceFile]:
    parts = urlsplit(source.uri, allow_fragments=False)
    bucket = f"{parts.scheme}://{parts.netloc}"
    pattern = source.uri.removeprefix(bucket).lstrip("/")
    if not parts.netloc:
        raise DataError(f"{field}: {source.uri!r} names no bucket; write {parts.scheme}://bucket/prefix")
    magic = MAGIC.search(pattern)
    matches = re.compile(fnmatch.translate(pattern)).match
    files = []
    prefix = pattern[: magic.start()] if magic else pattern
    with _naming(field):
        check_prefix(prefix)
    for info in bucket_store(bucket).list(prefix):
        is_inside = not pattern or info.key == pattern or info.key.startswith(pattern.rstrip("/") + "/")
        hidden = any(part.startswith(".") for part in info.key.split("/"))  # left out, as in a folder
        if hidden or info.key.endswith("/") or not (matches(info.key) if magic else is_inside):
            continue
        with _naming(field):
            check_key(info.key)
        format_, compression = suffixes(info.key, _format(source))
        files.append(
            SourceFile(
                name=f"{bucket}/{info.key}",
                kind="s3",
                root=bucket,
                path=info.key,
                digest=info.version,
                size=info.size,
                stamp=info.version,
                format=format_,
                compression=compression,
            )
        )
    if not files:
        raise MissingError(f"{field}: {source.uri!r} matches no object; check the prefix (a `*` also matches `/`)")
    return files


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Convert the refusal of a key that is invalid in the store into a DataError that names the source's field."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{field}: {error}") from None


def _dvc(source: Source, field: str) -> tuple[list[SourceFile], _Origin]:
    path = source.uri.removeprefix("dvc:").strip("/")
    repository = source.repo if "://" in source.repo or source.repo.startswith("git@") else _absolute(source.repo)
    filesystem = dvc_filesystem(repository, source.revision)
    try:
        info = filesystem.info(path)
        commit = filesystem.repo.get_rev()
    except FileNotFoundError:
        raise MissingError(
            f"{field}: {path!r} does not exist in {repository} at {source.revision or 'the work tree'}; "
            "check the path and `revision`"
        ) from None
    except Exception as error:
        if not type(error).__module__.startswith("dvc"):
            raise
        raise MissingError(
            f"{field}: {repository} at {source.revision}: {error}; check `repo` and `revision`"
        ) from None
    tracked = (info.get("dvc_info") or {}).get("md5")
    if source.revision is None:
        if repository != _absolute(source.repo):
            raise DataError(f"{field}: {repository} has no work tree here; give the source a `revision`")
        origin = _Origin("dvc", repository, f"{commit} (work tree)", tracked)
        return _listed(list_files(path, Path(repository), field), source, origin)
    if tracked is None:
        raise DataError(f"{field}: DVC does not track {path!r} in {repository} at {commit}; run `dvc add {path}` there")
    entries = filesystem.find(path, detail=True) if info["type"] == "directory" else {path: info}
    files = []
    for name, entry in sorted(entries.items()):
        details = entry.get("dvc_info") or {}
        format_, compression = suffixes(name, _format(source))
        files.append(
            SourceFile(
                name=f"{name}@{commit[:10]}",
                kind="dvc",
                root=repository,
                path=name,
                digest=f"md5:{details['md5']}",
                size=entry.get("size") or details.get("size") or 0,
                stamp=commit,
                format=format_,
                compression=compression,
            )
        )
    return files, _Origin("dvc", repository, commit, tracked)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
