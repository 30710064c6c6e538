"""The tokenise step: one worker makes its share of the units of a division, those that are not in the store yet.

The second of the three verbs of preparing a dataset on many machines (see `holdfast.components.divide`). A worker that
is lost costs the unit it was at: whoever does the share again goes on behind it.
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
    """Tokenise `share`, which is `I/N`: the I-th (from 0) of N. See `holdfast.corpus.tokenise`."""
    return tokenise(spec, store, division, share, progress)
