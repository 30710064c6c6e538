"""Datasets of the Hugging Face Hub: `hf://datasets/owner/name[@revision][/path-or-glob]`.

The revision is resolved to a commit once. All files are of that commit, and are identified by the digests that the Hub
keeps, so no file is fetched to identify a dataset. A file is fetched whole, into the cache of the machine that reads
it.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from typing import Literal

from holdfast.corpus.files import Format, SourceFile, suffixes
from holdfast.corpus.listing import MAGIC
from holdfast.dataset.manifest import LeftOut
from holdfast.model.hub import SCHEME, RepositoryFile, parse_place, repository_files
from holdfast.spec.data import Source
from holdfast.spec.errors import DataError, MissingError

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
