"""Metadata services of three clouds, queried for whether the cloud reclaims this machine.

A reply is bounded in time and size. No proxy is used, and no redirection is followed. `spot_notice` acts on a notice.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_object

SERVICE = "http://169.254.169.254"  # the same address in all three clouds, reachable only from the machine itself
TIMEOUT = 5.0  # seconds for a reply
MAX_ANSWER = 64 * 2**10  # bytes
HOLD_SECONDS = 30  # longest time that GCP holds a request until there is news
TOKEN_SECONDS = 21_600  # lifetime of a token of AWS
GCP_NOTICE = 30.0  # at most, by its documentation; the service names no time
_GOES = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})  # what Azure does to a machine; Freeze is a pause


@dataclass(frozen=True)
class Notice:
    """What a cloud is about to do to this machine."""

    words: str
    seconds: float | None = None  # until it happens; None if unknown
    certain: bool = True  # False: it may happen


class Cloud(Protocol):
    """One cloud's metadata service."""

    pause: float  # seconds between two queries

    def ask(self) -> Notice | None:
        """The current notice; None while the machine stays. Raises OSError or ValueError if the reply does not say."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]  # names in lower case
    text: str


class _Service:
    """Plain HTTP to the address of the service, with a new connection for each request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a metadata service: write http://HOST[:PORT]")
        self._host, self._port = parts.hostname, parts.port or 80

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET", wait: float = 0.0) -> _Answer:
        """The reply with status 200, 401 or 404. Raises OSError for all others."""
        connection = HTTPConnection(self._host, self._port, timeout=TIMEOUT + wait)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = _read(response, time.monotonic() + TIMEOUT)
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status not in (200, 401, 404) or len(body) > MAX_ANSWER:
            raise OSError(f"{method} {path.partition('?')[0]}: status {response.status}, {len(body)} bytes")
        return _Answer(
            response.status,
            {name.lower(): value for name, value in response.headers.items()},
            body.decode("utf-8", "replace"),
        )


def _read(response: HTTPResponse, deadline: float) -> bytes:
    """The body, or slightly more than the limit. The deadline is separate: a socket's timeout restarts with each
    piece."""
    body = b""
    while len(body) <= MAX_ANSWER and (piece := response.read1(4096)):
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer was not whole in {TIMEOUT:g} s")
    return body[: MAX_ANSWER + 1]


class Aws:
    """EC2, by version 2 of its service (IMDSv2): a notice two minutes ahead, and an earlier one that a reclaim is
    likely."""

    pause = 5.0

    def __init__(self, url: str = SERVICE) -> None:
        self._service, self._token = _Service(url), ""

    def ask(self) -> Notice | None:
        """See Cloud."""
        if text := self._read("spot/instance-action"):
            action = _object(text)
            return Notice(
                f"AWS will {str(action['action'])[:20]} it", _until(datetime.fromisoformat(str(action["time"])))
            )
        if self._read("events/recommendations/rebalance"):
            return Notice("AWS is likely to reclaim it", certain=False)
        return None

    def _read(self, path: str) -> str:
        """The text at a path; empty if it has none."""
        for fresh in (False, True):  # an expired token gets 401
            if fresh or not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                token = self._service.ask("/latest/api/token", headers, "PUT")
                if token.status != 200:
                    raise OSError(f"AWS gives no token: status {token.status}")
                self._token = token.text.strip()
            answer = self._service.ask(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                return answer.text if answer.status == 200 else ""
        raise OSError("AWS refuses its own token: status 401")


class Gcp:
    """Compute Engine: a notice half a minute ahead. The service holds each request until there is news."""

    pause = 1.0

    def __init__(self, url: str = SERVICE) -> None:
        self._service, self._tag = _Service(url), ""

    def ask(self) -> Notice | None:
        """See Cloud."""
        path, wait = "/computeMetadata/v1/instance/preempted", 0.0
        if self._tag:  # otherwise it would wait for a change that this client has not seen
            path += f"?wait_for_change=true&timeout_sec={HOLD_SECONDS}&last_etag={quote(self._tag, safe='')}"
            wait = HOLD_SECONDS
        answer = self._service.ask(path, {"Metadata-Flavor": "Google"}, wait=wait)
        if answer.status != 200:
            raise OSError(f"GCP does not say whether it is preempted: status {answer.status}")
        self._tag = answer.headers.get("etag", "")
        return Notice("GCP preempts it", GCP_NOTICE) if answer.text.strip() == "TRUE" else None


class Azure:
    """Azure's scheduled events: half a minute ahead of the eviction of a spot machine, longer ahead of a restart. All
    machines of a set receive them, and each looks for its own name."""

    pause = 1.0

    def __init__(self, url: str = SERVICE) -> None:
        self._service, self._name = _Service(url), ""

    def ask(self) -> Notice | None:
        """See Cloud."""
        self._name = self._name or self._read("instance/compute/name?api-version=2021-02-01&format=text").strip()
        events = _object(self._read("scheduledevents?api-version=2020-07-01"))
        for event in events.get("Events", []):
            if event["EventType"] in _GOES and self._name in event.get("Resources", []):
                begins = event.get("NotBefore") or ""  # empty once it has begun
                description = f"Azure has an event of kind {event['EventType']} for it"
                return Notice(description, _until(parsedate_to_datetime(begins)) if begins else 0.0)
        return None

    def _read(self, path: str) -> str:
        answer = self._service.ask(f"/metadata/{path}", {"Metadata": "true"})
        if answer.status != 200:
            raise OSError(f"Azure does not answer {path.partition('?')[0]}: status {answer.status}")
        return answer.text


CLOUDS = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def _object(text: str) -> dict[str, Any]:
    try:
        return parse_json_object(text, "the answer of the metadata service")
    except DataError as error:
        raise ValueError(str(error)) from None


def _until(moment: datetime) -> float:
    return max(0.0, moment.timestamp() - time.time())
