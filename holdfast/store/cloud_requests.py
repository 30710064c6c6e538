"""Requests to Google Cloud Storage and Azure Blob Storage: clients of obstore with time for the size of a body,
repeated requests, and errors with a remedy. No credential reaches a message."""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from obstore import exceptions
from obstore.store import AzureStore, GCSStore

from holdfast.runtime import retry
from holdfast.runtime.secrets import HIDDEN, redact
from holdfast.spec.errors import (
    AccessDeniedError,
    HoldfastError,
    MissingError,
    StoreRefusedError,
    StoreUnreachableError,
)
from holdfast.store.interface import ConflictError

CONNECT_SECONDS = 10
FREE_BYTES = 4 * 2**20  # bodies up to this size get no more time than a request without one
LEAST_RATE = 2**18  # bytes per second of a larger body, at least
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between requests that failed
WRITES = ("put", "put_if_absent", "put_stream", "probe")
ENDPOINTS = {"gs": ("GOOGLE_BASE_URL",), "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")}

_BYTES = re.compile(r"\[\d+(?:, \d+)+\]")

Result = TypeVar("Result")

_process: list[int] = []  # the id of the process whose threads send the requests


class CloudRequests:
    """Requests of one store, whose objects have `prefix` in `bucket`. `url`: of the store, for messages."""

    def __init__(self, scheme: str, bucket: str, prefix: str, url: str, deadline: float) -> None:
        self._scheme, self._bucket, self._prefix, self._url, self._deadline = scheme, bucket, prefix, url, deadline
        # The server, unless it is the cloud's own.
        self.address = next((found for name in ENDPOINTS[scheme] if (found := os.environ.get(name))), "")
        self._clients: dict[int, Any] = {}

    def client(self, size: int = 0) -> Any:
        """The client for requests with a body of at most `size` bytes. It gives a larger body more time, at the least
        rate; its library has one limit for all requests of a client."""
        doublings = (size // FREE_BYTES).bit_length()
        if doublings not in self._clients:
            seconds = self._deadline / 3  # so that a lost reply leaves time for another request
            more = (FREE_BYTES << doublings) / LEAST_RATE if doublings else 0.0
            options: dict[str, Any] = {
                "client_options": {
                    "timeout": timedelta(seconds=seconds + more),
                    "connect_timeout": timedelta(seconds=min(seconds, CONNECT_SECONDS)),
                    "allow_http": self.address.startswith("http://"),
                },
                "retry_config": {"retry_timeout": timedelta(seconds=seconds)},
            }
            make = GCSStore if self._scheme == "gs" else AzureStore
            try:
                self._clients[doublings] = make(self._bucket, prefix=self._prefix.rstrip("/") or None, **options)
            except exceptions.BaseError as error:
                raise StoreRefusedError(
                    f"{self._url}: {text_of(error)}; check the variables of the credentials"
                ) from None
        return self._clients[doublings]

    def send(self, name: str, key: str, send: Callable[[], Result]) -> Result:
        """The result of a request, which is repeated while the store does not answer."""
        return self.repeated(lambda: self._once(name, key, send), StoreUnreachableError)

    def repeated(self, action: Callable[[], Result], after: type[HoldfastError]) -> Result:
        """The result of `action`, which is repeated after such a failure, until the deadline."""
        return retry.retried(
            lambda _attempt: action(),
            lambda failure: isinstance(failure, after),
            first=FIRST_PAUSE,
            longest=LONGEST_PAUSE,
            seconds=self._deadline,
        )

    def _once(self, name: str, key: str, send: Callable[[], Result]) -> Result:
        _process[:] = _process or [os.getpid()]
        if _process != [os.getpid()]:
            raise StoreRefusedError(f"{self._url}: this process was forked after requests to it; start it anew (spawn)")
        try:
            return send()
        except (exceptions.NotFoundError, FileNotFoundError):
            if name in WRITES:
                raise StoreRefusedError(
                    f"{name} {key}: there is no {self._scheme}://{self._bucket}; create it"
                ) from None
            raise MissingError(f"{name} {key}: no such object in {self._url}") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise ConflictError(f"{name} {key}: {text_of(error)}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise AccessDeniedError(
                f"{name} {key} in {self._url}: {text_of(error)}; give these credentials get, put, list and delete"
            ) from None
        except exceptions.BaseError as error:
            raise StoreUnreachableError(
                f"{name} {key} in {self._url}: {text_of(error)}; check the address, the network and the credentials"
            ) from None


def text_of(error: BaseException) -> str:
    """The first line of an error of obstore, without its Debug form, and without bytes: a private key whose lines are
    wrong is in the error as a list of numbers."""
    line = _BYTES.sub(HIDDEN, str(error).partition("\n\n")[0].strip().replace("\n", " "))
    return redact(line)[:500]
