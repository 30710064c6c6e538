"""The final checkpoint of a run as a model in the Hugging Face layout, from the store to the store.

Promises the same bytes whoever writes them and however often, that a few hundred MiB of memory suffice whatever the
model's size, and that an export which died goes on with the file that it was at. Uses no disk: bytes go from ranges of
packs into the upload. (A file on the way would need the pod to have the room of a shard, and would be written twice.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from holdfast.components.checkpoint import Checkpoint, Manifest
from holdfast.components.dataset import Dataset
from holdfast.components.exchange.hugging_face import model_files
from holdfast.components.model.export import ExportFile
from holdfast.components.spec import Spec
from holdfast.components.spec.errors import MissingError
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import ConsoleProgress


def export(spec: Spec, manifest: Manifest, dataset: Dataset, store: Store) -> None:
    """Write the model of a checkpoint to its place in the store; what an earlier call has written of the same state is
    left as it is. Raises DataError or MissingError for what cannot be read of the checkpoint."""
    checkpoint = Checkpoint(store, manifest)
    files = model_files(checkpoint, spec, dataset)
    total, done = sum(file.size for file in files), 0
    written = _written(store, manifest)
    with ConsoleProgress(whole_step=False) as progress, ExitStack() as reading:  # how far the training is are its steps
        for file in files:
            key = layout.export(manifest.run_id, manifest.step, file.name)
            there = store.stat(key)
            if there is None or written.get(file.name) != there.version:
                if not checkpoint.is_marked:
                    reading.enter_context(checkpoint.marked())
                store.put_stream(key, file.size, partial(_told, file, progress, done, total))
                there = store.stat(key)
                if there is not None:
                    written[file.name] = there.version
                record = {"state_digest": manifest.state_digest, "files": written}
                store.put(layout.export_record(manifest.run_id, manifest.step), json.dumps(record, indent=1).encode())
            done += file.size
            progress("export", done, total)


def _told(file: ExportFile, progress: ConsoleProgress, before: int, total: int) -> Iterator[bytes | memoryview]:
    """The bytes of a file, telling how far the export is, in bytes."""
    done = before
    for data in file.content():
        yield data
        done += len(data)
        if done < total:
            progress("export", done, total)


def _written(store: Store, manifest: Manifest) -> dict[str, str]:
    """The files that are there of this state, and the store's versions of them."""
    try:
        record = json.loads(store.get(layout.export_record(manifest.run_id, manifest.step)))
    except MissingError:
        return {}
    return dict(record["files"]) if record["state_digest"] == manifest.state_digest else {}
