"""Requests to S3: one client for each process, each request repeated under its deadline, each failure explained.

botocore retries nothing. Leaves sessions, credentials, endpoint and region to boto3 and the usual AWS environment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from holdfast.components.runtime import place
from holdfast.components.spec.errors import MissingError
from holdfast.components.store.retry import retried
from holdfast.components.store.s3_errors import code_of, explain, no_such_bucket, status_of

S3Client = Any  # boto3 makes its class at run time
CONNECTIONS = 32  # open at once; some requests of a store overlap

Result = TypeVar("Result")


class PreconditionError(Exception):
    """The store refused a conditional write (412, or 404 for a match with what is absent)."""


class OutOfRangeError(Exception):
    """The range asked for begins at or after the end of the object (416)."""


class Requests:
    """Sends requests that concern `bucket`; `url` names the store in messages."""

    def __init__(self, bucket: str, url: str, deadline: float) -> None:
        self._bucket, self._url, self._deadline = bucket, url, deadline
        self._lock = threading.Lock()
        self._connected: tuple[int, S3Client] | None = None

    def __call__(
        self, operation: str, key: str, send: Callable[[S3Client], Result], *, conditional: bool = False
    ) -> Result:
        """The result of `send`, repeated under the deadline. Raises PreconditionError (when conditional),
        OutOfRangeError, HoldfastError."""
        what = f"{operation} {key} in {self._url}"

        def attempt(number: int) -> Result:
            try:
                return send(self.client())
            except ClientError as error:
                status = status_of(error)
                if conditional and (status == 412 or (status == 404 and code_of(error) == "NoSuchKey")):
                    raise PreconditionError from None
                if status == 416:
                    raise OutOfRangeError from None
                raise explain(error, f"{what} (attempt {number})", self._bucket) from None
            except (BotoCoreError, ResponseParserError, OSError) as error:
                raise explain(error, f"{what} (attempt {number})", self._bucket) from None

        with place.here.requesting():
            return retried(attempt, what, self._deadline)

    def server(self) -> tuple[str, str]:
        """Where the server of the bucket is, and what it calls itself: its name and version, as it likes to say."""
        try:
            reply = self("look at", "the bucket", lambda s3: s3.head_bucket(Bucket=self._bucket))
        except MissingError:
            raise no_such_bucket(self._url, self._bucket) from None
        return str(self.client().meta.endpoint_url), str(reply["ResponseMetadata"]["HTTPHeaders"].get("server", ""))

    def client(self) -> S3Client:
        """The client of this process: one connection pool must not be shared across a fork."""
        with self._lock:
            if self._connected is None or self._connected[0] != os.getpid():
                self._connected = (os.getpid(), _connect(self._deadline))
            return self._connected[1]


def _connect(deadline: float) -> S3Client:
    import boto3
    from botocore.config import Config

    session = boto3.Session()
    patience = max(1.0, min(20.0, deadline / 3))  # a silent server must leave time for another attempt
    config = Config(
        region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
        retries={"total_max_attempts": 1},
        connect_timeout=min(5.0, patience),
        read_timeout=patience,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        parameter_validation=False,  # a tenth of what a small request costs; what we pass does not come from outside
        # Bodies carry a CRC, which is signed; hashing them once more for the signature would cost 2x the time.
        s3={"payload_signing_enabled": False},
    )
    client = session.client("s3", config=config)
    # Only a conditional write may be refused by what is in the bucket, so only there it pays to ask before sending.
    client.meta.events.register_last("before-call.s3.UploadPart", _sent_at_once)
    return client


def _sent_at_once(params: dict[str, Any], **_: object) -> None:
    params["headers"].pop("Expect", None)
