"""MinHash of a document: bands of hashes, of which similar documents share one.

The hash of a document is a pure function of its words and the settings. Two documents whose sets of n-grams have the
Jaccard similarity s share a band with the probability 1 - (1 - s^rows)^bands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from holdfast.corpus.ngrams import FACTOR, Hashes, mixed, ngrams, word_hashes
from holdfast.spec.data import NearDuplicates

BAND_BYTES = 16
CHUNK = 2**12  # n-grams that are hashed together


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
