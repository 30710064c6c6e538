"""Tokenise step: one worker makes the units of its share of a division that are not in the store yet.

It is the second of three steps of preparing a dataset on many machines (see `holdfast.components.divide`). A lost
worker costs only its current unit. A repetition of the share continues after the finished units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.corpus import Tokenised, tokenise

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store
    from holdfast.telemetry import Progress

__all__ = ["Tokenised", "run"]


def run(spec: Spec, store: Store, division: str, share: str, progress: Progress | None = None) -> Tokenised:
    """Tokenize `share`, which is `I/N`: the I-th (from 0) of N. See `holdfast.corpus.tokenise`."""
    return tokenise(spec, store, division, share, progress)
