"""Words of a text and their n-grams, as 64-bit numbers that are the same on every machine."""

from __future__ import annotations

import re

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

WORD = re.compile(r"\w+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so nothing is lost
CACHED_WORDS = 400_000
CACHED_CHARACTERS = 64  # of a word; longer ones, such as base64, are not kept

Hashes = NDArray[np.uint64]


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
