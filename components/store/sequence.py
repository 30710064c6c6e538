"""Numbered records in a folder of the store, `000001.json` and on: each number is taken once, whoever asks at once."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from typing import Any

from holdfast.components.spec.errors import BadReaderError
from holdfast.components.store.interface import Store


def record_key(folder: str, number: int) -> str:
    """The key of a record."""
    return f"{folder}{number:06d}.json"


def records(store: Store, folder: str) -> list[tuple[int, float]]:
    """The numbers that are taken, and when each was (unix seconds by the store's clock), lowest first."""
    matches = ((re.search(r"/(\d{6,})\.json$", info.key), info) for info in store.list(folder))
    return sorted((int(match[1]), info.modified) for match, info in matches if match)  # the rest is not ours


def newest(store: Store, folder: str) -> int:
    """The highest number that is taken; 0 if none is."""
    return max((number for number, _ in records(store, folder)), default=0)


def take_next(store: Store, folder: str, record: dict[str, Any]) -> int:
    """Write `record`, with who wrote it when, under the next number, by put-if-absent."""
    who = {"host": socket.gethostname(), "pid": os.getpid(), "claimed": time.time(), "nonce": uuid.uuid4().hex}
    data = json.dumps({**who, **record}).encode()
    number = newest(store, folder) + 1
    while not store.put_if_absent(record_key(folder, number), data):
        number += 1
    return number


def read_record(store: Store, folder: str, number: int) -> dict[str, Any]:
    """A record, with `host`, `pid` and `claimed` (unix seconds by the writer's clock). Raises MissingError, and
    BadReaderError for what is not whole: the next number has a record of its own."""
    key = record_key(folder, number)
    try:
        found = json.loads(store.get(key))
    except ValueError as error:
        raise BadReaderError(f"{key} in {store.url} is no record, or a torn one ({error})") from None
    if not isinstance(found, dict):
        raise BadReaderError(f"{key} in {store.url} is no record: it holds no object")
    return found
