"""Where a run is: the backend that a command names, or the one that the run's own record does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.backends import VARIABLE, open_backend
from holdfast.pipelines.cli.options import err, open_chosen
from holdfast.spec.errors import MissingError, StoreUnreachableError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import Backend
    from holdfast.pipelines.backends.record import Record

BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        envvar=VARIABLE,
        help="local, kubeflow, argo, slurm or ray.",
        show_default=False,
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Holdfast's id of the run, its beginning, the backend's id, or a name.", show_default=False
    ),
]  # fmt: skip
DEFAULT = "kubeflow"  # what a spec is submitted to where nothing says otherwise


def find_backend(run: str, backend: str, store: str, endpoint: str, namespace: str) -> tuple[Backend, str]:
    """The backend that a run is on, and what the run is called there: as its record says, unless the command does."""
    from holdfast.pipelines.backends.record import find_record

    record = None
    if not endpoint:
        try:
            record = find_record(open_chosen(store), run)
        except StoreUnreachableError as error:
            if not backend:
                raise
            err(f"note: the run's own record cannot be read ({error})")  # the backend knows it too
    if record is not None and backend in ("", record.backend):
        return open_recorded(record.backend, store, endpoint, namespace, record), record.id
    if backend or endpoint or os.environ.get("KFP_ENDPOINT"):
        return open_backend(backend or DEFAULT, store=store, endpoint=endpoint, namespace=namespace), run
    raise MissingError(
        f"{run!r}: the store {open_chosen(store).url} does not say where it runs; give --store with the one that it "
        f"was submitted with, or --backend ({VARIABLE}), or --endpoint or KFP_ENDPOINT for Kubeflow"
    )


def open_recorded(name: str, store: str, endpoint: str, namespace: str, record: Record) -> Backend:
    """The backend `name`, where the record says that the run is; what the command says of the place goes first."""
    same = name == record.backend  # another backend's places are not in the record
    return open_backend(
        name, store=store, endpoint=endpoint or (record.endpoint if same else ""),
        namespace=namespace or (record.namespace if same else ""),
    )  # fmt: skip
