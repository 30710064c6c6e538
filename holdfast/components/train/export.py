"""Export: the final checkpoint of a run as a model in the Hugging Face layout, from the store to the store.

- Every writer and every repetition produces the same bytes.
- A few hundred MiB of memory are enough for any model size.
- A failed export continues with the file at which it stopped.
- The record holds the digests of all written bytes.

It uses no disk: bytes stream from ranges of packs into the upload. A temporary file would need disk space for a whole
shard in the pod, and its bytes would be written twice.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from holdfast.checkpoint import Checkpoint, Manifest
from holdfast.dataset import Dataset
from holdfast.exchange.hugging_face import model_files
from holdfast.model.export import ExportFile
from holdfast.model.exported import RECORD_BYTES
from holdfast.model.verified import Digester, ExportRecord
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout, read_bounded
from holdfast.telemetry import ConsoleProgress


def export(spec: Spec, manifest: Manifest, dataset: Dataset, store: Store) -> str:
    """Write the model of a checkpoint to its place in the store, and return the digest of the export. Files that an
    earlier call wrote for the same state are kept. Raises DataError or MissingError if the checkpoint cannot be
    read."""
    checkpoint = Checkpoint(store, manifest)
    files = model_files(checkpoint, spec, dataset)
    total, done = sum(file.size for file in files), 0
    folder = layout.export(manifest.run_id, manifest.step, manifest.state_digest)
    before = _written(store, folder)
    written = dict(before.files) if before is not None else {}
    with ConsoleProgress(whole_step=False) as progress, ExitStack() as reading:  # training progress is counted in steps
        for file in files:
            there = store.stat(folder + file.name)
            known = written.get(file.name)
            if there is None or known is None or known.version != there.version:
                if not checkpoint.is_marked:
                    reading.enter_context(checkpoint.marked())
                digesters: list[Digester] = []
                store.put_stream(
                    folder + file.name, file.size, partial(_digesting, file, digesters, progress, done, total)
                )
                there = store.stat(folder + file.name)
                written[file.name] = digesters[-1].record("" if there is None else there.version)
                part = ExportRecord(state_digest=manifest.state_digest, files=dict(written), whole=False)
                _keep(store, folder, part)
            done += file.size
            progress("export", done, total)
    names = {file.name for file in files}
    record = ExportRecord(
        state_digest=manifest.state_digest, files={name: written[name] for name in sorted(names)}, whole=True
    )
    if record != before:
        _keep(store, folder, record)
    return record.digest


def _keep(store: Store, folder: str, record: ExportRecord) -> None:
    store.put(layout.export_record(folder), record.model_dump_json(indent=1).encode())


def _digesting(
    file: ExportFile, digesters: list[Digester], progress: ConsoleProgress, before: int, total: int
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, digested on the way, with progress in bytes. The last of `digesters` belongs to the
    upload that succeeds."""
    digester = Digester()
    digesters.append(digester)
    written = before
    for data in file.content():
        digester.update(data)
        yield data
        written += len(data)
        if written < total:
            progress("export", written, total)


def _written(store: Store, folder: str) -> ExportRecord | None:
    """The record of an earlier call, or None if it cannot be read."""
    key = layout.export_record(folder)
    try:
        return ExportRecord.parse(read_bounded(store, key, RECORD_BYTES), f"{store.url}/{key}")
    except (MissingError, DataError):
        return None
