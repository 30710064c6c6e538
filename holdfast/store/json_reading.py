"""JSON records of the store, read whole and typed.

An object that is too large or not valid JSON is a DataError that names it, and never another kind of failure.
`holdfast.spec.json_parsing` does the parsing.
"""

from __future__ import annotations

from typing import TypeVar

from holdfast.spec.errors import MissingError
from holdfast.spec.json_parsing import REMEDY, JsonObject, parse_json, parse_json_object
from holdfast.store.bounded_read import read_bounded
from holdfast.store.interface import Store

T = TypeVar("T")


def read_json(store: Store, key: str, model: type[T], remedy: str = REMEDY) -> T:
    """The record at `key` as `model`. Raises MissingError, and DataError for an invalid record."""
    return parse_json(read_bounded(store, key), model, f"{store.url}/{key}", remedy)


def read_json_object(store: Store, key: str, remedy: str = REMEDY) -> JsonObject:
    """The record at `key` as an object whose fields the caller checks. Raises as `read_json`."""
    return parse_json_object(read_bounded(store, key), f"{store.url}/{key}", remedy)


def find_json(store: Store, key: str, model: type[T], remedy: str = REMEDY) -> T | None:
    """The same; None if the object does not exist."""
    try:
        return read_json(store, key, model, remedy)
    except MissingError:
        return None
