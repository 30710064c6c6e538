"""Requests to S3: each is repeated under its deadline, its failures are explained, and refused credentials are read
again.

botocore retries nothing. `s3_clients` has the clients, `s3_errors` the classification of failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from botocore.exceptions import ClientError

from holdfast.runtime import deadlines, heartbeat
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.store.retry import RetryableError, retried
from holdfast.store.s3_clients import Clients, S3Client
from holdfast.store.s3_codes import Meaning
from holdfast.store.s3_errors import (
    NO_CREDENTIALS,
    code_of,
    damaged_again,
    expired,
    explain,
    no_such_bucket,
    reply_meaning,
    status_of,
)

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
        what = f"{operation} {key} in {self._url}"
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
                        raise damaged_again(reply, what, damaged) from None
                renew(reply_meaning(reply), client, code_of(reply))
                if reply_meaning(reply) is Meaning.UNKNOWN_KEY and self._clients.recently_renewed:
                    raise expired(f"{code_of(reply)}: the server does not know the new ones yet") from None
                raise explain(reply, f"{what} (attempt {number})", self._bucket) from None
            except Exception as error:  # noqa: BLE001 - boto raises more kinds than it declares
                if isinstance(error, NO_CREDENTIALS) and self._has_worked:
                    renew(Meaning.EXPIRED, client, type(error).__name__)
                    raise expired(type(error).__name__) from None
                raise explain(error, f"{what} (attempt {number})", self._bucket) from None
            self._has_worked = True
            return result

        with heartbeat.here.requesting():
            return retried(attempt, what, self._deadline)

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
        except Exception:  # noqa: BLE001 - what the HEAD said stands
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
