"""Where a run is: the backend that a command names, otherwise the one in the run's record."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.pipelines.backends import VARIABLE, open_backend
from holdfast.pipelines.cli.options import BackendOptions, err, open_chosen
from holdfast.spec.errors import MissingError, StoreUnreachableError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend
    from holdfast.pipelines.backends.record import Record

WITH_ENDPOINT = "kubeflow"  # the backend of a run for which only an endpoint is known


def find_backend(run: str, where: BackendOptions) -> tuple[Backend, str]:
    """The backend of a run, and its id there. The command's options take precedence over the run's record."""
    from holdfast.pipelines.backends.record import find_record

    record = None
    if not where.endpoint:
        try:
            record = find_record(open_chosen(where.store), run)
        except StoreUnreachableError as error:
            if not where.backend:
                raise
            err(f"note: the run's own record cannot be read ({error})")  # the backend knows it too
    if record is not None and where.backend in ("", record.backend):
        return open_recorded(where, record), record.id
    if where.backend or where.endpoint or os.environ.get("KFP_ENDPOINT"):
        name = where.backend or WITH_ENDPOINT
        return open_backend(name, store=where.store, endpoint=where.endpoint, namespace=where.namespace), run
    raise MissingError(
        f"{run!r}: the store {open_chosen(where.store).url} does not say where it runs; give --store with the one that "
        f"it was submitted with, or --backend ({VARIABLE}), or --endpoint or KFP_ENDPOINT for Kubeflow"
    )


def open_recorded(where: BackendOptions, record: Record) -> Backend:
    """The backend of a record, or the one that the command names. The command's places take precedence."""
    name = where.backend or record.backend
    same = name == record.backend  # another backend's places are not in the record
    return open_backend(
        name, store=where.store, endpoint=where.endpoint or (record.endpoint if same else ""),
        namespace=where.namespace or (record.namespace if same else ""),
    )  # fmt: skip
