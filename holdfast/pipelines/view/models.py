"""Lookup of an exported model's folder by a run, a registered model, or a path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.model.exported import fetch_exported
from holdfast.model.files import Files, Folder
from holdfast.pipelines.view.catalog import find_run
from holdfast.runtime.environment import cache_dir
from holdfast.spec.errors import ForeignVersionError, MissingError
from holdfast.store import Store, open_store

if TYPE_CHECKING:
    from holdfast.tracking import Champion


def locate(wanted: str, store: Store) -> Files:
    """The files in the Hugging Face layout that `wanted` names. Raises MissingError.

    `wanted` is a folder, `name@alias`, `name/version`, a run's id (or its beginning) or name, or a registered model
    (its champion, otherwise its newest version).
    """
    folder = Path(wanted).expanduser()
    if (folder / "config.json").is_file():
        return Folder(folder)
    if "@" in wanted:
        name, _, alias = wanted.partition("@")
        return _registered(name, store, alias=alias)
    name, _, version = wanted.rpartition("/")
    if name and version.isdigit():
        return _registered(name, store, version=int(version))
    try:
        record = find_run(store, wanted)
    except MissingError as no_run:
        try:
            return _registered(wanted, store)
        except MissingError:
            raise MissingError(
                f"{no_run}; there is also no folder with a config.json and no registered model of that name"
            ) from None
    if record.result is None:
        raise MissingError(
            f"run {record.run_id}: is at step {record.step} and has no exported model yet; let it finish"
        )
    return _fetched(store, str(record.result["export"]), str(record.result.get("export_digest", "")))


def locate_adapter(wanted: str, store: Store) -> Files:
    """The files of a LoRA adapter: a folder in the layout of peft, or what `locate` takes. Raises MissingError."""
    folder = Path(wanted).expanduser()
    return Folder(folder) if (folder / "adapter_config.json").is_file() else locate(wanted, store)


def _fetched(store: Store, export: str, expected: str) -> Files:
    return fetch_exported(store, export, cache_dir() / "exports", expected)


def _registered(name: str, store: Store, version: int | None = None, alias: str | None = None) -> Files:
    from holdfast.tracking import champion, connect, versions
    from holdfast.tracking.registry import CHAMPION, version_by_alias

    candidates = versions(name, store)
    if not candidates:
        raise MissingError(f"{name!r}: MLflow has no registered model of that name; see `holdfast models list`")
    if version is None and alias in (None, CHAMPION) and (champion_version := champion(name, store)) is not None:
        return _files(champion_version)
    if version is None and alias not in (None, CHAMPION):
        aliased = version_by_alias(connect(), name, str(alias))
        version = None if aliased is None else int(aliased.version)
    if version is None and alias is not None:
        raise MissingError(f"{name}@{alias}: no version has that alias; versions: {_listed(candidates)}")
    own = [candidate for candidate in candidates if not candidate.foreign]
    if version is None and own:
        return _files(own[-1])
    for candidate in candidates if version is not None else candidates[-1:]:
        if version in (None, candidate.version):
            return _files(candidate)
    raise MissingError(f"{name}/{version}: no such version; versions: {_listed(candidates)}")


def _files(version: Champion) -> Files:
    if version.foreign:
        raise ForeignVersionError(version.foreign)
    return _fetched(open_store(version.store_url), version.export, version.export_digest)


def _listed(known: list[Champion]) -> str:
    return ", ".join(f"{candidate.version}{' (foreign)' if candidate.foreign else ''}" for candidate in known)
