"""From what a person calls a model to the folder with its export: a run, a registered model, or the folder itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.components.model.exported import fetch_exported
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.spec.errors import MissingError
from holdfast.components.store import Store, layout, open_store
from holdfast.pipelines.view.catalog import find_run

if TYPE_CHECKING:
    from holdfast.components.tracking import Champion


def locate(wanted: str, store: Store) -> Path:
    """The folder in the Hugging Face layout that `wanted` names: a folder, `name@alias`, `name/version`, a run's id (or
    its beginning) or name, or a registered model (its champion, else its newest version). Raises MissingError.
    """
    folder = Path(wanted).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if "@" in wanted:
        name, _, alias = wanted.partition("@")
        return _registered(name, alias=alias)
    name, _, version = wanted.rpartition("/")
    if name and version.isdigit():
        return _registered(name, version=int(version))
    try:
        record = find_run(store, wanted)
    except MissingError as no_run:
        try:
            return _registered(wanted)
        except MissingError:
            raise MissingError(
                f"{no_run}; nor is there a folder with a config.json or a registered model so named"
            ) from None
    if record.result is None:
        raise MissingError(
            f"run {record.run_id}: is at step {record.step} and has no exported model yet; let it finish"
        )
    return _fetched(store, layout.export(record.run_id, record.step))


def _fetched(store: Store, export: str) -> Path:
    return fetch_exported(store, export, cache_dir() / "exports")


def _registered(name: str, version: int | None = None, alias: str | None = None) -> Path:
    from holdfast.components.tracking import connect, versions
    from holdfast.components.tracking.registry import version_by_alias

    known = versions(name)
    if not known:
        raise MissingError(f"{name!r}: MLflow has no registered model of that name with a version that Holdfast made")
    if version is None:
        found = version_by_alias(connect(), name, alias or "champion")
        if found is not None:
            version = int(found.version)
        elif alias is None:
            version = known[-1].version
        else:
            raise MissingError(f"{name}@{alias}: no version has that alias; versions: {_listed(known)}")
    for candidate in known:
        if candidate.version == version:
            return _fetched(open_store(candidate.store_url), candidate.export)
    raise MissingError(f"{name}/{version}: no such version; versions: {_listed(known)}")


def _listed(known: list[Champion]) -> str:
    return ", ".join(str(candidate.version) for candidate in known)
