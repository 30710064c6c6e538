"""Readers and filters of user code: how a worker process reads a file with one, and drops a document with one.

A reader gets the bytes and the name of a file, and yields its texts. A filter gets the text of a document, and returns
whether it is kept. Both are functions of `holdfast.code`, named in the spec. A record in the store never names one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.code.load import describe
from holdfast.code.resolve import bind, enter_code, entered_folder
from holdfast.corpus.files import SourceFile, opened
from holdfast.corpus.record_types import Flaw, Record, excerpt
from holdfast.spec.data import Cleaning, Data
from holdfast.spec.errors import DataError, HoldfastError, UserCodeError
from holdfast.spec.functions import Function
from holdfast.spec.identity import function_identity
from holdfast.spec.tree import Spec
from holdfast.store import Store

MAX_FILE = 2**30  # bytes of a file that a reader gets, unpacked


@dataclass(frozen=True)
class OwnFunctions:
    """The readers and filters of a spec, for the processes that read its sources."""

    readers: tuple[Function | None, ...] = ()  # by source
    filters: tuple[Function, ...] = ()
    folder: str = ""  # of the verified code, on this machine

    @classmethod
    def of(cls, data: Data) -> OwnFunctions:
        """Those of a spec. Their code must have been entered (`enter_own_code`)."""
        return cls(tuple(source.reader for source in data.sources), data.cleaning.filters, entered_folder())

    def read(self, source: int, file: SourceFile, identity: str) -> Iterator[tuple[int, Record]]:
        """The texts of a file of `source`, each with its number from 1. `identity` is that of the reader with which
        the corpus was divided. Raises UserCodeError for a reader that fails."""
        reader = self.readers[source] if source < len(self.readers) else None
        if reader is None or reader_identity(reader) != identity:
            raise DataError(f"{file.name}: was divided with another reader than that of the spec; run divide again")
        with opened(file) as stream:
            data = stream.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            yield 0, Flaw("too_long", f"has more than {MAX_FILE:,} bytes, more than a reader gets; divide the file")
            return
        function, number = _bound(reader, self.folder), 0
        try:
            for text in function(data, file.name):
                number += 1
                yield number, _checked(text, reader, file)
        except HoldfastError:
            raise
        except Exception as error:
            place = f"{file.name}, after {number} texts"
            raise UserCodeError(f"{reader.use}: failed on {place}: {describe(error, Path(self.folder))}") from error

    def dropped(self, text: str) -> Flaw | None:
        """The reason of a filter to drop a document, or None to keep it. Raises UserCodeError for one that fails."""
        for each in self.filters:
            try:
                kept = _bound(each, self.folder)(text)
            except Exception as error:
                raise UserCodeError(f"{each.use}: failed: {describe(error, Path(self.folder))}") from error
            if not isinstance(kept, bool):
                raise UserCodeError(f"{each.use}: returned {type(kept).__name__}; return True to keep a document")
            if not kept:
                return Flaw("filtered", f"is not kept by the filter {each.use}", excerpt(text))
        return None


NO_FUNCTIONS = OwnFunctions()


def enter_own_code(spec: Spec, store: Store) -> None:
    """Make the readers and filters of a spec callable in this process."""
    if spec.data.cleaning.filters or any(source.reader is not None for source in spec.data.sources):
        enter_code(store, spec.code)


def reader_identity(reader: Function | None) -> str:
    """What determines the texts that a reader yields, as text. Empty without a reader."""
    return "" if reader is None else json.dumps(function_identity("data.sources", reader), sort_keys=True)


def cleaning_settings(cleaning: Cleaning, *left_out: str) -> dict[str, Any]:
    """The settings of cleaning that determine tokens. Filters count by their source, and not at all if there are
    none: older keys do not have them."""
    settings = cleaning.model_dump(exclude={"filters", "decontaminate", *left_out})  # tasks count by their content
    if settings.get("near_duplicates") is None:
        settings.pop("near_duplicates", None)
    if cleaning.filters:
        settings["filters"] = [function_identity("data.cleaning.filters", each) for each in cleaning.filters]
    return settings


@lru_cache(maxsize=64)
def _bound(function: Function, folder: str) -> Callable[..., Any]:
    return bind(function, folder)


def _checked(text: Any, reader: Function, file: SourceFile) -> Record:
    if not isinstance(text, str):
        raise UserCodeError(f"{reader.use}: yielded {type(text).__name__} from {file.name}; yield texts")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Flaw("undecodable", f"has a lone surrogate at character {error.start}")
    return text
