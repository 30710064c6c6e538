"""Requests to S3: each is repeated under its deadline, its failures are explained, and refused credentials are read
again.

botocore retries nothing. `errors` classifies failures.
"""

import contextlib
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from holdfast.runtime import deadlines, heartbeat
from holdfast.spec.errors import HoldfastError, MissingError, StoreRefusedError
from holdfast.store.s3.errors import (
    NO_CREDENTIALS,
    Meaning,
    RedirectedError,
    RetryableError,
    code_of,
    damaged_again,
    expired,
    explain,
    explain_setup,
    no_such_bucket,
    reply_meaning,
    retried,
    status_of,
)

# The S3 client of a process, and the credentials that it was created with.
#
# All threads of a process share one client. A fork gets a new one, and so do new credentials. The credentials of a
# file, a role or a program are replaced while a run continues. Credentials are compared by digest and stored nowhere.
# boto3 and the usual AWS environment determine sessions, endpoint and region.

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


@functools.cache
def _data_loader(data_path: str | None) -> Any:
    """Loader of botocore's descriptions of S3. A session takes 0.1 s to read them, so all sessions share one copy."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _connect(deadline: float) -> _Connection:
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.Session()
    core.register_component("data_loader", _data_loader(core.get_config_variable("data_path")))
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


DAMAGED_TIMES = 4  # a body that arrives damaged this often is not sent again
# Refusals that other credentials may lift.
CREDENTIALS = (Meaning.EXPIRED, Meaning.UNKNOWN_KEY, Meaning.DENIED)

Result = TypeVar("Result")


class OutcomeError(Exception):
    """A result of a request, as opposed to a failure: the caller gets it unchanged."""


class PreconditionError(OutcomeError):
    """The store refused a conditional write (412, or 404 for a match of an absent object)."""


class OutOfRangeError(OutcomeError):
    """The range begins at or after the end of the object (416)."""


class Requests:
    """Sends requests that concern `bucket`; `url` names the store in messages."""

    def __init__(self, bucket: str, url: str, deadline: float) -> None:
        self._bucket, self._url, self._deadline = bucket, url, deadline
        self._clients = Clients(url, deadline)
        self._has_worked = False

    def __call__(
        self, operation: str, key: str, send: Callable[[S3Client], Result], *, conditional: bool = False, size: int = 0
    ) -> Result:
        """The result of `send`, repeated under the deadline; a body of `size` bytes has more time. Raises
        PreconditionError (when conditional), OutOfRangeError, HoldfastError."""
        request = f"{operation} {key} in {self._url}"
        damaged = 0
        renewed = False

        def renew(meaning: Meaning, client: S3Client, code: str) -> None:
            """Read the credentials again after a refusal that other ones may lift. This happens once, since some
            sources give other ones each time, but after every expiry. Raises RetryableError if a new attempt may
            succeed."""
            nonlocal renewed
            if meaning is not Meaning.EXPIRED and (renewed or meaning not in CREDENTIALS):
                return
            if self._clients.renew(client, often=meaning is not Meaning.EXPIRED):
                renewed = True
                raise RetryableError(f"{code}: the credentials were replaced")

        began = time.monotonic()

        def attempt(number: int) -> Result:
            nonlocal damaged
            client = self.client()
            try:
                result = self._bounded(send, client, began, size)
            except (HoldfastError, RetryableError, OutcomeError, MemoryError):
                raise
            except ClientError as error:
                if conditional and (status_of(error) == 412 or code_of(error) == "NoSuchKey"):
                    raise PreconditionError from None
                if status_of(error) == 416:
                    raise OutOfRangeError from None
                reply = self._with_code(error, client)
                if reply_meaning(reply) is Meaning.DAMAGED:
                    damaged += 1
                    if damaged == DAMAGED_TIMES:
                        raise damaged_again(reply, request, damaged) from None
                renew(reply_meaning(reply), client, code_of(reply))
                if reply_meaning(reply) is Meaning.UNKNOWN_KEY and self._clients.recently_renewed:
                    raise expired(f"{code_of(reply)}: the server does not know the new ones yet") from None
                raise explain(reply, f"{request} (attempt {number})", self._bucket) from None
            except Exception as error:  # noqa: BLE001 - boto raises more kinds than it declares
                if isinstance(error, NO_CREDENTIALS) and self._has_worked:
                    renew(Meaning.EXPIRED, client, type(error).__name__)
                    raise expired(type(error).__name__) from None
                raise explain(error, f"{request} (attempt {number})", self._bucket) from None
            self._has_worked = True
            return result

        with heartbeat.here.requesting():
            return retried(attempt, request, self._deadline)

    def _bounded(self, send: Callable[[S3Client], Result], client: S3Client, began: float, size: int) -> Result:
        """The result of `send`, bounded by the deadline of its operation. Raises RetryableError at the deadline."""
        # The last attempt begins before the deadline, and has time for a reply.
        due = max(began + self._deadline, time.monotonic() + min(20.0, self._deadline / 3))
        with deadlines.attempt_until(due + size / deadlines.LEAST_RATE) as current:
            try:
                result = send(client)
            except Exception:
                if not current.overdue:
                    raise
            if current.overdue:
                raise RetryableError(f"no whole reply within {time.monotonic() - began:.0f} s")
            return result

    def _with_code(self, error: ClientError, client: S3Client) -> ClientError:
        """The error with a code. A refused HEAD has no code, so expired credentials or a wrong clock look like other
        refusals. A listing, whose reply has a body, distinguishes them."""
        if error.operation_name not in ("HeadObject", "HeadBucket") or status_of(error) not in (400, 401, 403):
            return error
        try:
            client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        except ClientError as other:
            if reply_meaning(other) in (Meaning.EXPIRED, Meaning.UNKNOWN_KEY, Meaning.CLOCK):
                return other
        except Exception:  # noqa: BLE001 - the result of the HEAD stands
            return error
        return error

    def server(self) -> tuple[str, str]:
        """The address of the bucket's server, and the name and version that it reports."""
        try:
            reply = self("look at", "the bucket", lambda s3: s3.head_bucket(Bucket=self._bucket))
        except MissingError:
            raise no_such_bucket(self._url, self._bucket) from None
        return str(self.client().meta.endpoint_url), str(reply["ResponseMetadata"]["HTTPHeaders"].get("server", ""))

    def client(self) -> S3Client:
        """The client of this process. Raises HoldfastError."""
        return self._clients.current()
