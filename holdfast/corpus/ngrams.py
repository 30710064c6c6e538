"""Words of a text and their n-grams, as 64-bit numbers that are the same on every machine.

MinHash makes bands of hashes of a document, of which similar documents share one. The hash of a document is a pure
function of its words and the settings. Two documents whose sets of n-grams have the Jaccard similarity s share a band
with the probability 1 - (1 - s^rows)^bands.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.spec.data import NearDuplicates

WORD = re.compile(r"\w+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so nothing is lost
CACHED_WORDS = 400_000
CACHED_CHARACTERS = 64  # of a word; longer ones, such as base64, are not kept

Hashes = NDArray[np.uint64]
BAND_BYTES = 16
CHUNK = 2**12  # n-grams that are hashed together


class _WordNumbers(dict[str, int]):
    """A cache of the numbers of words."""

    def __missing__(self, word: str) -> int:
        number = int.from_bytes(blake3(word.encode(errors="replace")).digest(length=8), "little")
        if len(word) <= CACHED_CHARACTERS:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = number
        return number


_words = _WordNumbers()


def word_hashes(text: str) -> Hashes:
    """The number of each word of a text, in order: uint64 [words]. Case, blanks and punctuation do not count."""
    return np.array([_words[word] for word in WORD.findall(text.lower())], dtype=np.uint64)


def ngrams(words: Hashes, size: int) -> Hashes:
    """The number of each run of `size` words: uint64 [words - size + 1], empty for fewer words."""
    count = len(words) - size + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for at in range(size):
        hashes = mixed(hashes * FACTOR + words[at : at + count])
    return hashes


def mixed(hashes: Hashes) -> Hashes:
    """Numbers whose every bit depends on every bit (the finalizer of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


@dataclass(frozen=True)
class MinHash:
    """The bands of documents under some settings."""

    rules: NearDuplicates

    def bands(self, text: str) -> bytes:
        """The digests of the bands of a text, of BAND_BYTES each. A text without words shares them only with equal
        texts."""
        rules = self.rules
        words = word_hashes(text)
        grams = np.unique(ngrams(words, min(rules.words, len(words)))) if len(words) else words
        if not len(grams):
            return blake3(text.encode(errors="replace")).digest(length=BAND_BYTES * rules.bands)
        least = self._least(grams).reshape(rules.bands, rules.rows)
        return b"".join(
            blake3(band.astype("<u8").tobytes(), derive_key_context=f"band {number}").digest(length=BAND_BYTES)
            for number, band in enumerate(least)
        )

    def _least(self, grams: Hashes) -> Hashes:
        """The least hash of the n-grams under each hash function: uint64 [bands x rows]."""
        least = np.full(len(self._keys), np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(grams), CHUNK):
            hashed = mixed(grams[start : start + CHUNK, None] ^ self._keys)
            least = np.minimum(least, hashed.min(axis=0))
        return least

    @cached_property
    def _keys(self) -> Hashes:
        """A key for each hash function."""
        return mixed(np.arange(1, self.rules.bands * self.rules.rows + 1, dtype=np.uint64) * FACTOR)
