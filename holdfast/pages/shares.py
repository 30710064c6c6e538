"""Stacked bars as inline SVG: how several things (ranks, nodes) divide one whole, for comparison.

The page's style sheet has the colors, in the order of the kinds. Hovering over a part shows its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from holdfast.pages.render import render

WIDTH, LEFT, BAR, GAP = 1080, 76, 18, 6
MOST = 64  # bars of one picture


def draw_shares(bars: Sequence[tuple[str, Mapping[Any, float]]], kinds: Sequence[str], unit: str) -> Markup:
    """Draw one bar for each of `bars` (a label, and values by kind), all at the scale of the longest.

    `kinds` sets order and color. Returns a sentence when there is nothing to draw.
    """
    longest = max((sum(values.values()) for _, values in bars), default=0.0)
    if longest <= 0:
        return Markup('<p class="muted">Nothing was told of it.</p>')
    drawn = []
    for index, (label, values) in enumerate(bars[:MOST]):
        whole, at, parts = sum(values.values()), float(LEFT), []
        for number, kind in enumerate(kinds):
            if (value := values.get(kind, 0.0)) <= 0:
                continue
            width = (WIDTH - LEFT) * value / longest
            parts.append((number, at, width, f"{label}: {kind} {value:,.1f} {unit}, {100 * value / whole:.1f} %"))
            at += width
        drawn.append((index * (BAR + GAP), label, parts))
    present = [(number, kind) for number, kind in enumerate(kinds) if any(values.get(kind) for _, values in bars)]
    height = len(drawn) * (BAR + GAP)
    return render("shares.html", bars=drawn, kinds=present, width=WIDTH, left=LEFT, bar=BAR, height=height)
