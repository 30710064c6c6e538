"""Check that the store responds and supports conditional writes, on which everything else relies."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from holdfast.pipelines.doctor.findings import TIMEOUT, Finding
from holdfast.spec.errors import HoldfastError, StoreRefusedError
from holdfast.store import open_store

NAME = "store"


def check(url: str, *, on_cluster: bool) -> Iterator[Finding]:
    """One finding about the store at `url`."""
    try:
        store = open_store(url, deadline=TIMEOUT)
        key = f"doctor/{secrets.token_hex(8)}"
        store.put_if_absent(key, b"doctor")  # a store without conditional writes refuses the first one
        store.delete(key)
    except StoreRefusedError as error:
        remedy = "two attempts could overwrite each other: use a server that holds If-None-Match and If-Match"
        yield Finding(NAME, "fail", str(error), remedy, error.exit_code)
        return
    except HoldfastError as error:
        remedy = "check HOLDFAST_STORE, AWS_ENDPOINT_URL and credentials that may get, put, list and delete objects"
        yield Finding(NAME, "fail", f"{error}", remedy, error.exit_code)
        return
    if on_cluster and url.startswith("file:"):
        remedy = "set HOLDFAST_STORE=s3://bucket/prefix, or mount the same folder into every pod (cluster.volumes)"
        yield Finding(NAME, "warn", f"{store.url} is a folder of this machine: pods do not see it", remedy)
    else:
        yield Finding(NAME, "ok", f"{store.url} answers and holds conditional writes")
