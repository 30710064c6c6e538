"""The S3 client of a process, and the credentials that it was created with.

All threads of a process share one client. A fork gets a new one, and so do new credentials: those of a file, a role or
a program are replaced while a run continues. Credentials are compared by digest and stored nowhere. boto3 and the usual
AWS environment determine sessions, endpoint and region.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.runtime import deadlines
from holdfast.spec.errors import StoreRefusedError
from holdfast.store.s3_errors import RedirectedError, explain_setup

S3Client = Any  # boto3 creates its class at run time
CONNECTIONS = 32  # open concurrently; some requests of a store overlap
LOOK_SECONDS = 1.0  # interval between two searches for new credentials while a server reports that they have expired
ROTATION_SECONDS = 60.0  # age below which a key may be unknown to some servers
REDIRECTIONS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class _Connection:
    process: int
    client: S3Client
    credentials: str  # their digest


class Clients:
    """Gives the client of this process for the store at `url`; `deadline` bounds the wait of one request."""

    def __init__(self, url: str, deadline: float) -> None:
        self._url, self._deadline = url, deadline
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._looked = self._replaced = -ROTATION_SECONDS  # by the monotonic clock

    def current(self) -> S3Client:
        """The client: one connection pool must not be shared across a fork. Raises HoldfastError."""
        with self._lock:
            if self._connection is None or self._connection.process != os.getpid():
                try:
                    self._connection = _connect(self._deadline)
                except StoreRefusedError as error:
                    raise StoreRefusedError(f"{self._url}: {error}") from None
                except Exception as error:  # noqa: BLE001 - boto raises more kinds than it declares
                    raise explain_setup(error, f"connect to {self._url}") from None
            return self._connection.client

    def renew(self, failed: S3Client, *, often: bool = True) -> bool:
        """Whether there are other credentials than those of `failed`, a client that was refused; `current` then uses
        them. Without `often`, the answer is at most LOOK_SECONDS old."""
        with self._lock:
            before = self._connection
            if before is None or before.client is not failed:
                return True  # another thread was first
            now = time.monotonic()
            if not often and now - self._looked < LOOK_SECONDS:
                return False
            self._looked = now
            with contextlib.suppress(Exception):  # a file that is being written: the next search finds it whole
                new = _connect(self._deadline)
                if new.credentials not in (before.credentials, ""):
                    self._connection, self._replaced = new, now
                    return True
            return False

    @property
    def recently_renewed(self) -> bool:
        """Whether the credentials were replaced so recently that the server may not know them yet."""
        return time.monotonic() - self._replaced < ROTATION_SECONDS


def _connect(deadline: float) -> _Connection:
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.Session()
    session = boto3.Session(botocore_session=core)
    patience = max(1.0, min(20.0, deadline / 3))  # a silent server must leave time for another attempt
    config = Config(
        region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
        retries={"total_max_attempts": 1},
        connect_timeout=min(5.0, patience),
        read_timeout=patience,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        parameter_validation=False,  # a tenth of the cost of a small request; our parameters do not come from outside
        # Bodies carry a CRC, which is signed. Hashing them again for the signature would take twice the time.
        s3={"payload_signing_enabled": False},
    )
    client = session.client("s3", config=config)
    if str(client.meta.endpoint_url).startswith("https:"):
        _check_bundle(core.get_config_variable("ca_bundle"))
    deadlines.bound(client._endpoint.http_session._manager)  # type: ignore[attr-defined]
    # The bucket's content can refuse only a conditional write, so only there it pays to wait for "100 Continue".
    client.meta.events.register_last("before-call.s3.UploadPart", _sent_immediately)
    client.meta.events.register_first("before-parse.s3", _stop_redirection)
    return _Connection(os.getpid(), client, _digest(session))


def _digest(session: Any) -> str:
    """A digest of the credentials of a session; empty without credentials."""
    credentials = session.get_credentials()
    if credentials is None:
        return ""
    frozen = credentials.get_frozen_credentials()
    text = "\0".join(str(part or "") for part in (frozen.access_key, frozen.secret_key, frozen.token))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_bundle(path: str | None) -> None:
    """Refuse a missing bundle of certificates: botocore would report it as a failed connection."""
    if path and not Path(path).exists():
        raise StoreRefusedError(
            f"AWS_CA_BUNDLE {path}: no such file; set it (or ca_bundle in the AWS configuration file, or "
            "REQUESTS_CA_BUNDLE) to the file with the certificates of the authorities, or unset it"
        )


def _sent_immediately(params: dict[str, Any], **_: object) -> None:
    params["headers"].pop("Expect", None)


def _stop_redirection(response_dict: dict[str, Any], **_: object) -> None:
    """Stop redirections. botocore takes each one for a bucket in another region, and follows it until the stack is
    full. A bucket that is in another region names the region. Raises RedirectedError."""
    headers = {str(name).lower(): value for name, value in response_dict["headers"].items()}
    if response_dict["status_code"] in REDIRECTIONS and "x-amz-bucket-region" not in headers:
        raise RedirectedError(response_dict["status_code"], str(headers.get("location", "")))
