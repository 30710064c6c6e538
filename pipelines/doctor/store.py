"""Whether the store answers, and keeps the one promise that everything else stands on: conditional writes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from holdfast.components.spec.errors import ExitCode, HoldfastError
from holdfast.components.store import ConflictError, Store, open_store
from holdfast.pipelines.doctor.findings import TIMEOUT, Finding

NAME = "store"


def check(url: str, *, on_cluster: bool) -> Iterator[Finding]:
    """One finding about the store at `url`."""
    try:
        store = open_store(url, deadline=TIMEOUT)
        honoured = _honours_conditions(store)
    except HoldfastError as error:
        remedy = "check HOLDFAST_STORE, AWS_ENDPOINT_URL and credentials that may get, put, list and delete objects"
        yield Finding(NAME, "fail", f"{error}", remedy, error.exit_code)
        return
    if not honoured:
        remedy = (
            "a second writer was not refused, so two attempts could overwrite each other: use a server that honours "
            "If-None-Match and If-Match"
        )
        yield Finding(NAME, "fail", f"{store.url} ignores conditional writes", remedy, ExitCode.UNEXPECTED)
    elif on_cluster and url.startswith("file:"):
        remedy = "set HOLDFAST_STORE=s3://bucket/prefix, or mount the same folder into every pod (cluster.volumes)"
        yield Finding(NAME, "warn", f"{store.url} is a folder of this machine: pods do not see it", remedy)
    else:
        yield Finding(NAME, "ok", f"{store.url} answers and honours conditional writes")


def _honours_conditions(store: Store) -> bool:
    """Whether a second writer is refused, for an object that is there and for one that has changed."""
    key = f"doctor/{secrets.token_hex(8)}"
    store.put_if_absent(key, b"first")
    try:
        if store.put_if_absent(key, b"second"):
            return False
        _, version = store.get_versioned(key)
        store.compare_and_swap(key, b"third", version)
        try:
            store.compare_and_swap(key, b"fourth", version)
        except ConflictError:
            return True
        return False
    finally:
        store.delete(key)
