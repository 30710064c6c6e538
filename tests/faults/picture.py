"""Draws a run whose nodes joined and left: which node computed which step, and the resulting digests.
`HOLDFAST_PICTURE=docs/elastic.svg .venv/bin/pytest -m drill tests/faults/test_members.py -k ddp` draws the picture in
README.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, TOP, WIDTH, LANE = 96, 62, 640, 26
COLOURS = ("#4c78a8", "#e45756", "#f2a03d", "#54a24b", "#8b6bb1")


@dataclass(frozen=True)
class Stretch:
    """The steps that one gang computed."""

    nodes: frozenset[str]
    start: int  # steps before the gang started
    end: int  # steps when the gang ended
    kept: int  # the step that the next gang resumed from


def picture(stretches: Sequence[Stretch], names: Sequence[str], lost: Sequence[str], digests: Sequence[str]) -> str:
    """An SVG with one lane per node in `names`. `lost`: the killed nodes. `digests`: lines below the lanes."""
    last = max(stretch.end for stretch in stretches)
    height = TOP + LANE * len(names) + 46 + 18 * len(digests)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {height}" role="img" '
        'font-family="ui-monospace, monospace" font-size="12">',
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]

    def at(step: float) -> float:
        return round(LEFT + WIDTH * step / last, 1)

    for place, name in enumerate(names):
        parts.append(f'<text x="{LEFT - 10}" y="{TOP + LANE * place + 17}" text-anchor="end">{escape(name)}</text>')
    for number, stretch in enumerate(stretches):
        colour = COLOURS[number % len(COLOURS)]
        middle = (at(stretch.start) + at(stretch.kept)) / 2
        ranks = len(stretch.nodes)
        parts.append(f'<text x="{middle}" y="{TOP - 26}" text-anchor="middle" fill="{colour}">{ranks} nodes</text>')
        parts.append(f'<text x="{middle}" y="{TOP - 10}" text-anchor="middle">{stretch.start}–{stretch.kept}</text>')
        for place, name in enumerate(names):
            if name not in stretch.nodes:
                continue
            y = TOP + LANE * place + 4
            for start, end, opacity in ((stretch.start, stretch.kept, 1.0), (stretch.kept, stretch.end, 0.3)):
                if end > start:
                    parts.append(
                        f'<rect x="{at(start)}" y="{y}" width="{at(end) - at(start) - 1:.1f}" height="{LANE - 8}" '
                        f'fill="{colour}" opacity="{opacity}"/>'
                    )
            if name in lost and max(other.end for other in stretches if name in other.nodes) == stretch.end:
                parts.append(f'<text x="{at(stretch.end) + 4}" y="{y + 14}" font-weight="bold">✕ SIGKILL</text>')
    bottom = TOP + LANE * len(names)
    parts.append(f'<line x1="{LEFT}" y1="{bottom + 4}" x2="{LEFT + WIDTH}" y2="{bottom + 4}" stroke="#888888"/>')
    for step in range(0, last + 1, 8):
        parts.append(f'<text x="{at(step)}" y="{bottom + 20}" text-anchor="middle" fill="#555555">{step}</text>')
    for place, line in enumerate(digests):
        parts.append(
            f'<text x="{LEFT - 86}" y="{bottom + 46 + 18 * place}" style="white-space:pre">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
