"""JSON post to a webhook, such as Slack's. It is bounded in time and never fatal.

It makes at most three tries of a few seconds each. The URL is a secret, and no part of it is logged or raised.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.error import HTTPError

from holdfast.runtime import deadlines
from holdfast.runtime.retry import retried
from holdfast.runtime.secrets import redact_record

TRIES = 3
TIMEOUT = 5.0  # seconds without a response from the server
TOTAL = 10.0  # maximum seconds of a try
PAUSE = 0.5  # seconds before the second try; doubles

log = logging.getLogger("holdfast.notify")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirect: a redirected POST becomes a GET, which sends more than intended."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(deadlines.bound_class(HTTPConnection), request)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(deadlines.bound_class(HTTPSConnection), request)  # type: ignore[arg-type]


def post(url: str, message: Mapping[str, Any]) -> bool:
    """Post `message` as JSON. Returns whether the server accepted it. Failures are logged."""
    if not url.startswith(("http://", "https://")):
        log.warning("HOLDFAST_WEBHOOK is neither http:// nor https://; nothing was posted")
        return False
    body = json.dumps(redact_record(message), ensure_ascii=False).encode()

    def send(_: int) -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
        opener = urllib.request.build_opener(_NoRedirect, _Http, _Https)
        with deadlines.within(TOTAL), opener.open(request, timeout=TIMEOUT):
            return

    try:
        retried(send, _passes, tries=TRIES, first=PAUSE, longest=PAUSE * 2)
    except (OSError, HTTPException, ValueError) as error:  # their texts may hold the URL
        reason = f"status {error.code}" if isinstance(error, HTTPError) else type(error).__name__
        log.warning(
            "the webhook in HOLDFAST_WEBHOOK did not take the summary (%s); it is in the log and the store", reason
        )
        return False
    return True


def _passes(error: BaseException) -> bool:
    if isinstance(error, HTTPError):
        return error.code >= 500 or error.code == 429
    return isinstance(error, OSError | HTTPException | ValueError)
