"""Exported model of a run, read from its store with every byte verified. Needs no torch."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from holdfast.model.files import Files, Folder
from holdfast.model.verified import ExportRecord, VerifiedFiles
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout, local_folder, read_bounded

RECORD_BYTES = 64 * 2**20  # enough for 7 TB of weights


class _StoredFiles:
    """The files under a key prefix of a store, read by ranges without a copy."""

    def __init__(self, store: Store, export: str) -> None:
        self._store, self._prefix = store, f"{export.rstrip('/')}/"

    @property
    def where(self) -> str:
        return f"{self._store.url}/{self._prefix}".rstrip("/")

    def size(self, name: str) -> int | None:
        info = self._store.stat(self._prefix + name)
        return None if info is None else info.size

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        self._store.read_into(self._prefix + name, start, target)


def exported_files(store: Store, export: str, expected: str = "") -> VerifiedFiles:
    """The files of the exported model under the key prefix `export`. `expected` is its digest in a verdict, a result
    or a registration. Raises MissingError and DataError."""
    return VerifiedFiles(_StoredFiles(store, export), read_record(store, export, expected))


def fetch_exported(store: Store, export: str, copies: Path, expected: str = "") -> VerifiedFiles:
    """The files of the exported model under the key prefix `export`. They are read in place on this machine, or else
    from a copy in `copies`. Raises MissingError and DataError."""
    record = read_record(store, export, expected)
    folder = local_folder(store, export, copies, lambda name: name in record.files)
    if folder is None:
        raise MissingError(f"{_absent(store, export)}")
    files: Files = Folder(folder)
    return VerifiedFiles(files, record)


def read_record(store: Store, export: str, expected: str = "") -> ExportRecord:
    """The record of an export. Raises MissingError if it does not exist or the export is not finished, and DataError
    if it differs from `expected`."""
    key = layout.export_record(export)
    try:
        record = ExportRecord.parse(read_bounded(store, key, RECORD_BYTES), f"{store.url}/{key}")
    except MissingError:
        raise MissingError(_absent(store, export)) from None
    if not record.whole:
        raise MissingError(f"{store.url}/{export}: the export is not finished; run the spec again, train finishes it")
    if expected and record.digest != expected:
        raise DataError(
            f"{store.url}/{export}: is another export ({record.digest}) than the one that was judged ({expected}): its "
            "files or their record were replaced. Restore them, or evaluate and register the run anew"
        )
    return record


def require_intact(
    store: Store,
    export: str,
    expected: str = "",
    *,
    names: Iterable[str] | None = None,
    changed: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ExportRecord:
    """Read the files of an export (all, or `names`) and compare every byte with its record. With `changed`, only
    files with another version in the store than the written one are read. Raises MissingError, and DataError that
    names the first damaged file."""
    record = read_record(store, export, expected)
    for name, reason in damaged_files(store, export, record, names=names, changed=changed, progress=progress):
        problem = f"{store.url}/{export.rstrip('/')}/{name}: {reason}"
        if reason == "is missing":
            raise MissingError(f"{problem}; run the spec again, train writes it anew")
        raise DataError(f"{problem}; delete that file and run the spec again: train writes it anew")
    return record


def damaged_files(
    store: Store,
    export: str,
    record: ExportRecord,
    *,
    names: Iterable[str] | None = None,
    changed: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[tuple[str, str]]:
    """The files of an export that differ from what was written, each with the problem."""
    files = VerifiedFiles(_StoredFiles(store, export), record)
    chosen = sorted(record.files if names is None else names)
    total, done = sum(record.files[name].size for name in chosen if name in record.files), 0
    for name in chosen:
        written = record.files.get(name)
        if written is None:
            yield name, "is missing"
            continue
        stored = store.stat(f"{export.rstrip('/')}/{name}")
        if not (changed and stored is not None and stored.version == written.version):
            yield from ((name, reason) for reason in files.damages(name))
        done += written.size
        progress(done, total)


def _absent(store: Store, export: str) -> str:
    return f"{store.url}/{export}: there is no exported model there; run the spec again, train writes it anew"
