"""An exported model in a store, with its record, from the files of a folder."""

from collections.abc import Iterable
from pathlib import Path

from holdfast.model.verified import Digester, ExportRecord
from holdfast.store import Store, layout


def write_export(
    store: Store, run_id: str, step: int, state_digest: str, folder: Path, names: Iterable[str]
) -> tuple[str, str]:
    """Upload the files as the train step does. Returns the prefix of the export and its digest."""
    export, files = layout.export(run_id, step, state_digest), {}
    for name in sorted(names):
        digester = Digester()
        digester.update((folder / name).read_bytes())
        store.upload(folder / name, export + name)
        info = store.stat(export + name)
        assert info is not None
        files[name] = digester.record(info.version)
    record = ExportRecord(state_digest=state_digest, files=files, whole=True)
    store.put(layout.export_record(export), record.model_dump_json().encode())
    return export, record.digest
