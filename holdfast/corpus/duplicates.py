"""Duplicate detection: which documents repeat an earlier one, in memory that does not grow with their number.

It is an external sort by digest. Documents beyond one chunk go to files in a scratch folder with their corpus
positions, one file for each value of the digest's first byte. Each file is then sorted in memory. A file that is too
large is first divided by the next byte. Scratch space is 24 bytes for each document and 8 for each duplicate, in this
machine's folder for temporary files (TMPDIR). A corpus of up to CHUNK documents needs none.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.data import Cleaning

CHUNK = 2**19  # documents processed together
SORTED = 2**20  # records that are sorted in memory together: about 100 MB meanwhile
RANGE = 2**22  # positions with results in memory together, one byte each

RECORD = np.dtype([("digest", "V16"), ("place", "<u8")])
DIGEST_BYTES = 16

Flags = NDArray[np.bool_]


class FirstOccurrences:
    """For every document in corpus order: whether it is the first with its text."""

    def __init__(self, folder: Path, documents: int) -> None:
        self._folder = folder
        self.documents = documents
        self._at = 0
        self._first: Flags = np.zeros(0, dtype=bool)  # of the range that contains `_at`

    def take(self, count: int) -> Flags:
        """The results for the next `count` documents: bool [count]."""
        assert self._at + count <= self.documents
        answers = np.empty(count, dtype=bool)
        filled = 0
        while filled < count:
            number, inside = divmod(self._at, RANGE)
            if not inside:
                self._first = self._range(number)
            part = min(count - filled, len(self._first) - inside)
            answers[filled : filled + part] = self._first[inside : inside + part]
            filled, self._at = filled + part, self._at + part
        return answers

    def _range(self, number: int) -> Flags:
        start = number * RANGE
        first = np.ones(min(RANGE, self.documents - start), dtype=bool)
        path = _dropped_file(self._folder, number)
        if path.exists():
            first[np.fromfile(path, dtype="<u8") - np.uint64(start)] = False
        return first


@contextlib.contextmanager
def first_occurrences(parts: Iterable[NDArray[Any]]) -> Iterator[FirstOccurrences]:
    """Process the digests (16 bytes each, [n]) of all parts of a corpus, in order."""
    with temporary_folder("duplicates") as name:
        folder = Path(name)
        digests = folder / "digests"
        documents = 0
        last: NDArray[Any] | None = None  # it goes to the disk only if another chunk follows
        for chunk in _chunks(parts):
            if last is not None:
                _spread(digests, last, 0)
            places = np.arange(documents, documents + len(chunk), dtype="<u8")
            repeated = repeats(chunk)
            _drop(folder, places[repeated])
            last = _records(chunk[~repeated], places[~repeated])
            documents += len(chunk)
        if last is not None and digests.exists():
            _spread(digests, last, 0)
            del last
            _drop_repeats(folder, digests, 0)
        yield FirstOccurrences(folder, documents)


@contextlib.contextmanager
def near_repeats(parts: Iterable[NDArray[Any]], bands: int) -> Iterator[Callable[[int], Flags]]:
    """Process the band digests (16 bytes each, [n, bands]) of all parts of a corpus, in order. Yields a function that
    gives the results for the next documents: whether an earlier one has the same digest of a band. Scratch space is
    16 bytes for each band of a document, in addition to one band's of `first_occurrences`."""
    with temporary_folder("near-duplicates") as name, contextlib.ExitStack() as stack:
        paths = [Path(name) / f"band-{band:03d}" for band in range(bands)]
        files = [stack.enter_context(path.open("wb")) for path in paths]
        documents = 0
        for part in parts:
            documents += len(part)
            for band, file in enumerate(files):
                np.ascontiguousarray(part[:, band]).tofile(file)
        for file in files:
            file.close()
        flags = np.memmap(Path(name) / "flags", dtype=bool, mode="w+", shape=(max(1, documents),))
        for path in paths:
            with first_occurrences(_from_file(path)) as first:
                for start in range(0, documents, CHUNK):
                    count = min(CHUNK, documents - start)
                    flags[start : start + count] |= ~first.take(count)
            path.unlink()
        at = 0

        def take(count: int) -> Flags:
            nonlocal at
            at += count
            return np.array(flags[at - count : at])

        yield take


def _from_file(path: Path) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        while len(digests := np.fromfile(file, dtype=f"V{DIGEST_BYTES}", count=CHUNK)):
            yield digests


@dataclass(frozen=True)
class Repeats:
    """For every document in corpus order: whether it repeats an earlier one, exactly or nearly."""

    first: FirstOccurrences | None = None  # None: exact repeats are kept
    near: Callable[[int], Flags] | None = None  # None: near repeats are kept

    def take(self, count: int) -> tuple[Flags, Flags]:
        """The results for the next `count` documents: bool [count] for exact repeats, and for other near ones."""
        exact = ~self.first.take(count) if self.first else np.zeros(count, dtype=bool)
        return exact, (self.near(count) & ~exact if self.near else np.zeros(count, dtype=bool))


@contextlib.contextmanager
def find_repeats(indexes: Callable[[], Iterator[NDArray[Any]]], cleaning: Cleaning) -> Iterator[Repeats]:
    """The repeats in a corpus, whose `indexes` are read once for each kind that is dropped."""
    with contextlib.ExitStack() as stack:
        first = near = None
        if cleaning.deduplicate:
            first = stack.enter_context(first_occurrences(index["digest"] for index in indexes()))
        if rules := cleaning.near_duplicates:
            near = stack.enter_context(near_repeats((index["bands"] for index in indexes()), rules.bands))
        yield Repeats(first, near)


def repeats(digests: NDArray[Any]) -> Flags:
    """Which of the digests (16 bytes each, [n]) came before: bool [n]. In memory."""
    words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    order = np.lexsort((high, low))  # stable: equal digests stay in the order of the corpus
    same = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
    repeated = np.zeros(len(words), dtype=bool)
    repeated[order[1:][same]] = True
    return repeated


def _chunks(parts: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The digests in chunks of CHUNK, and a last chunk with the rest."""
    parts_held: list[NDArray[Any]] = []
    size = 0
    for part in parts:
        rest = part
        while size + len(rest) >= CHUNK:
            parts_held.append(rest[: CHUNK - size])
            rest = rest[CHUNK - size :]
            yield np.concatenate(parts_held)
            parts_held, size = [], 0
        if len(rest):
            parts_held.append(rest.copy())  # a view would keep the whole part alive
            size += len(rest)
    if parts_held:
        yield np.concatenate(parts_held)


def _records(digests: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
    records = np.empty(len(digests), dtype=RECORD)
    records["digest"], records["place"] = digests, places
    return records


def _spread(folder: Path, records: NDArray[Any], depth: int) -> None:
    """Append the records to the files of a folder, by byte `depth` of their digests, in order."""
    folder.mkdir(exist_ok=True)
    bytes_ = np.ascontiguousarray(records["digest"]).view(np.uint8).reshape(-1, DIGEST_BYTES)[:, depth]
    order = np.argsort(bytes_, kind="stable")
    ends = np.searchsorted(bytes_[order], np.arange(257))
    sorted_ = records[order]
    for value in range(256):
        if ends[value] < ends[value + 1]:
            with (folder / f"{value:02x}").open("ab") as file:
                sorted_[ends[value] : ends[value + 1]].tofile(file)


def _drop_repeats(folder: Path, spread: Path, depth: int) -> None:
    """Record which entries in a folder of files repeat an earlier one. Deletes the files."""
    for path in sorted(spread.iterdir()):
        if path.stat().st_size > SORTED * RECORD.itemsize and depth + 1 < DIGEST_BYTES:
            parted = path.with_name(f"{path.name}-parted")
            with path.open("rb") as file:
                while len(records := np.fromfile(file, dtype=RECORD, count=SORTED)):
                    _spread(parted, records, depth + 1)
            path.unlink()
            _drop_repeats(folder, parted, depth + 1)
            continue
        records = np.fromfile(path, dtype=RECORD)
        _drop(folder, records["place"][repeats(records["digest"])])
        path.unlink()


def _drop(folder: Path, places: NDArray[Any]) -> None:
    numbers = places // np.uint64(RANGE)
    for number in np.unique(numbers).tolist():
        with _dropped_file(folder, number).open("ab") as file:
            places[numbers == number].tofile(file)


def _dropped_file(folder: Path, number: int) -> Path:
    return folder / f"dropped-{number:06d}"
