"""Decontamination: documents that share a run of words with a file of an evaluation task.

The words of all tasks become numbers once. A document is compared with them by its n-grams, and names the task that it
shares words with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from holdfast.corpus.files import read_user_file
from holdfast.corpus.ngrams import WORD, Hashes, ngrams, word_hashes
from holdfast.corpus.record_types import Flaw, excerpt
from holdfast.runtime.logs import log
from holdfast.spec.data import Cleaning, Decontamination
from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json_value

FIELD = "data.cleaning.decontaminate.tasks"
MAX_TASK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TaskNgrams:
    """The n-grams of task files, and where each first occurs."""

    words: int  # of an n-gram
    places: tuple[str, ...]  # file and line of each text of a task
    hashes: bytes  # uint64, sorted and unique
    numbers: bytes  # uint32: of each n-gram, the number of the place
    digest: str  # of the files

    @classmethod
    def read(cls, rules: Decontamination) -> TaskNgrams:
        """Read the task files. Raises MissingError, DataError."""
        places: list[str] = []
        found: list[Hashes] = []
        short, digests = 0, []
        for raw, path in _files(rules):
            digests.append(_identity(raw, path))
            for line, text in _texts(raw, path):
                grams = ngrams(word_hashes(text), rules.words)
                short += not len(grams)
                if len(grams):
                    places.append(f"{path.rpartition('/')[2]}:{line}")
                    found.append(grams)
        if short:
            log.info("%s: %d texts have fewer than %d words and are not compared", FIELD, short, rules.words)
        if not found:
            remedy = "name files with longer texts, or lower data.cleaning.decontaminate.words"
            raise DataError(f"{FIELD}: no text has {rules.words} words; {remedy}")
        numbers = np.repeat(np.arange(len(found), dtype=np.uint32), [len(grams) for grams in found])
        hashes, first = np.unique(np.concatenate(found), return_index=True)
        return cls(rules.words, tuple(places), hashes.tobytes(), numbers[first].tobytes(), _digest(rules, digests))

    def overlap(self, text: str) -> Flaw | None:
        """The reason to drop a text that shares words with a task, or None."""
        words = word_hashes(text)
        grams = ngrams(words, self.words)
        if not len(grams):
            return None
        at = np.minimum(np.searchsorted(self._hashes, grams), len(self._hashes) - 1)
        same = np.flatnonzero(self._hashes[at] == grams)
        if not len(same):
            return None
        start = int(same[0])
        place = self.places[int(np.frombuffer(self.numbers, dtype=np.uint32)[at[start]])]
        shared = [match.group() for match in WORD.finditer(text)][start : start + self.words]
        share = len(same) / len(grams)
        detail = f"shares {self.words} words with {place} ({share:.0%} of its {self.words}-grams are in tasks)"
        return Flaw("contaminated", detail, excerpt(" ".join(shared)))

    @cached_property
    def _hashes(self) -> Hashes:
        return np.frombuffer(self.hashes, dtype=np.uint64)


def read_tasks(cleaning: Cleaning) -> TaskNgrams | None:
    """The n-grams of a spec's tasks. None without decontamination."""
    return None if cleaning.decontaminate is None else TaskNgrams.read(cleaning.decontaminate)


def tasks_digest(rules: Decontamination) -> str:
    """A digest of the task files, how they are read, and the settings, without the paths. Raises MissingError,
    DataError."""
    return _digest(rules, [_identity(raw, path) for raw, path in _files(rules)])


def _digest(rules: Decontamination, digests: list[str]) -> str:
    return blake3(json.dumps([rules.words, digests]).encode()).hexdigest()


def _identity(raw: bytes, path: str) -> str:
    return f"{_kind(path)} {blake3(raw).hexdigest()}"


def _kind(path: str) -> Literal["json", "lines of json", "text"]:
    if path.endswith(".json"):
        return "json"
    return "lines of json" if path.endswith((".jsonl", ".ndjson")) else "text"


def _files(rules: Decontamination) -> Iterator[tuple[bytes, str]]:
    for number, path in enumerate(rules.tasks):
        yield read_user_file(path, f"{FIELD}.{number}", MAX_TASK_BYTES), path


def _texts(raw: bytes, path: str) -> Iterator[tuple[int, str]]:
    """The texts of a task file with their lines from 1: every text of a record of .jsonl and .json, else lines."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{FIELD}: {path} is not UTF-8 at byte {error.start}; convert it") from None
    kind = _kind(path)
    if kind == "json":
        value = parse_json_value(text, f"{FIELD}: {path}", "name JSON or text", finite=False)
        for number, record in enumerate(value if isinstance(value, list) else [value], 1):
            yield from ((number, item) for item in _strings(record))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if kind == "lines of json" and line.strip():
            record = parse_json_value(line, f"{FIELD}: {path}:{number}", "name JSON lines or text", finite=False)
            yield from ((number, item) for item in _strings(record))
        elif line.strip():
            yield number, line


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
