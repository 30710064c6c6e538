"""Numbered records in a folder of the store, from `000001.json`: each number is taken once, even by concurrent
writers."""

import json
import os
import re
import socket
import time
import uuid
from itertools import islice
from typing import Any

from pydantic import BaseModel

from holdfast.spec.errors import BadReaderError, DataError
from holdfast.spec.json_parsing import JsonObject, parse_json, parse_json_object
from holdfast.store.interface import ObjectInfo, Store
from holdfast.store.json_reading import read_bounded

PAGE = 1000  # objects in a page of a listing
FIVE_DIGITS = 10**5  # below it the keys of all records lie in the order of their numbers

_REMEDY = "run the same command again: the next number has a separate record"


def record_key(folder: str, number: int) -> str:
    """The key of a record."""
    return f"{folder}{number:06d}.json"


def records(store: Store, folder: str, after: int = 0) -> list[tuple[int, float]]:
    """The taken numbers above `after` and the time of each (Unix seconds by the store's clock), lowest first. While
    `after` has at most five digits, keys below it are not listed."""
    infos = store.list(folder, record_key(folder, after)) if 0 < after < FIVE_DIGITS else store.list(folder)
    numbered = ((number, info.modified) for info in infos if (number := _number_of(info)))  # other objects are ignored
    return sorted(record for record in numbered if record[0] > after)


def newest(store: Store, folder: str) -> int:
    """The highest number that is taken; 0 if none is. It lists few of many records: it searches ahead by steps that
    double while records are found, then halves the rest."""
    lowest, step, beyond = 0, 0, FIVE_DIGITS  # no record is at `beyond` or above it
    while lowest + step < FIVE_DIGITS:
        page = list(islice(store.list(folder, record_key(folder, lowest + step)), PAGE))
        highest = max(filter(None, map(_number_of, page)), default=0)
        if len(page) < PAGE and (highest or not step):
            return max(lowest, highest)
        if len(page) == PAGE and highest <= lowest:
            break  # other objects than records: the position of the next record is unknown
        if not highest:
            beyond = lowest + step
        lowest = max(lowest, highest)
        step = max(PAGE, 2 * step) if lowest + step < beyond else step
        if lowest + step >= beyond:
            step = (beyond - lowest) // 2 if beyond - lowest > PAGE else 0
    return max((number for number, _ in records(store, folder)), default=0)


def _number_of(info: ObjectInfo) -> int:
    """The number of a record; 0 for another object."""
    match = re.search(r"/(\d{6,})\.json$", info.key)
    return int(match[1]) if match else 0


def take_next(store: Store, folder: str, record: dict[str, Any]) -> int:
    """Write `record`, with its writer and the time, under the next number, by put-if-absent."""
    claimer = {"host": socket.gethostname(), "pid": os.getpid(), "claimed": time.time(), "nonce": uuid.uuid4().hex}
    data = json.dumps({**claimer, **record}).encode()
    number = newest(store, folder) + 1
    while not store.put_if_absent(record_key(folder, number), data):
        number += 1
    return number


def read_record(store: Store, folder: str, number: int, model: type[BaseModel] | None = None) -> JsonObject:
    """A record, with `host`, `pid` and `claimed` (Unix seconds by the writer's clock). Raises MissingError, and
    BadReaderError for a record that is torn or does not match `model`: the next number has its own record."""
    key = record_key(folder, number)
    try:
        data, source = read_bounded(store, key), f"{store.url}/{key}"
        record = parse_json_object(data, source, _REMEDY)
        if model is not None:
            parse_json(data, model, source, _REMEDY)
    except DataError as error:
        raise BadReaderError(str(error)) from None
    return record
