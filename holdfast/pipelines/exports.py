"""Lookup and complete verification of a run's exported models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout, read_bounded

if TYPE_CHECKING:
    from holdfast.checkpoint.tools import Verified

_RECORD = re.compile(r"step-(\d+)-[^/.]+\.json")


def exports_of(store: Store, run_id: str, steps: Sequence[int] | None = None) -> list[str]:
    """The key prefixes of the exported models of a run, or of only some steps."""
    folder = layout.exports(run_id)
    names = (info.key.removeprefix(folder) for info in store.list(folder))
    matches = ((name, match) for name in names if (match := _RECORD.fullmatch(name)))
    return [
        f"{folder}{name.removesuffix('.json')}/" for name, match in matches if steps is None or int(match[1]) in steps
    ]


def verify_export(
    store: Store, run_id: str, export: str, progress: Callable[[int, int], None] = lambda *_: None
) -> Verified:
    """Verify every byte of an exported model and its MLflow package, and the records that name it."""
    from holdfast.checkpoint.tools import Damage, Verified
    from holdfast.components.register.publish import changed_package
    from holdfast.model.exported import RECORD_BYTES, damaged_files
    from holdfast.model.verified import ExportRecord

    key = layout.export_record(export)
    match = re.search(r"/step-(\d+)-", export)
    step = int(match[1]) if match else 0
    try:
        record = ExportRecord.parse(read_bounded(store, key, RECORD_BYTES), f"{store.url}/{key}")
    except (DataError, MissingError) as error:
        return Verified(step, 0, (Damage(key, "", str(error)),), export=export)
    damaged = list(damaged_files(store, export, record, progress=progress))
    damages = [Damage(f"{export}{name}", "", reason) for name, reason in (*damaged, *changed_package(store, export))]
    damages += [Damage(key, "", reason) for key, reason in _records(store, run_id, export, record.digest)]
    intact_bytes = sum(file.size for name, file in record.files.items() if name not in dict(damaged))
    return Verified(step, intact_bytes, tuple(damages), export=export)


def _records(store: Store, run_id: str, export: str, digest: str) -> Iterator[tuple[str, str]]:
    """The damaged records of a run: those that name this export or its objects by a digest that does not match."""
    from holdfast.components.train.result import read_result
    from holdfast.tracking.registrations import content_digest, read_registration

    result = read_result(store, run_id)
    if result is not None and result.export == export and result.export_digest != digest:
        yield layout.result(run_id), f"names the export {result.export_digest}, and it is {digest}"
    for info in store.list(layout.registrations(run_id)):
        registration = read_registration(store, info.key)
        if registration is None:
            yield info.key, "is no registration; register the run again, it is written anew"
            continue
        if registration.export != export:
            continue
        if registration.export_digest != digest:
            yield info.key, f"names the export {registration.export_digest}, and it is {digest}"
        run_record = layout.run(run_id, "run.json")
        digests = {
            layout.blessing(run_id, registration.verdict_digest): registration.verdict_digest,
            run_record: registration.run_digest,
            **{
                layout.model_document(run_id, info.key.rpartition("/")[2].removesuffix(".json"), name): document
                for name, document in registration.documents.items()
            },
        }
        for key, expected in digests.items():
            try:
                if expected and content_digest(store.get(key)) != expected:
                    yield key, f"is not what {info.key} names"
            except MissingError:
                yield key, f"is missing, and {info.key} names it"
