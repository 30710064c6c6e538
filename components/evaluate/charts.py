"""Line charts as inline SVG: a few plain functions, no script, colours from the page's style sheet.

Promises that thousands of steps draw fast and that thinning keeps every spike. Hovering a chart shows its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

MAX_POINTS = 600  # of a drawn line
MAX_HOVERS = 120  # places that answer to the pointer


@dataclass(frozen=True)
class Series:
    """A line. `kind` is the class in the style sheet that colours it."""

    name: str
    points: Sequence[Point]
    kind: str = "first"


@dataclass(frozen=True)
class Chart:
    """One picture: lines over steps, an optional level (a dashed line across), and marks at some steps."""

    title: str
    series: Sequence[Series]
    width: int = 1080
    height: int = 300
    from_zero: bool = False
    level: tuple[str, float] | None = None
    marks: Sequence[tuple[float, str]] = field(default=())


def draw_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element; a sentence instead when there is nothing to draw."""
    drawn = [Series(one.name, finite(one.points), one.kind) for one in chart.series]
    everything = [point for one in drawn for point in one.points]
    if len(everything) < 2:
        return f'<p class="muted">{escape(chart.title)}: too few steps to draw.</p>'
    levels = [chart.level[1]] if chart.level and math.isfinite(chart.level[1]) else []
    ys = [y for _, y in everything] + levels + ([0.0] if chart.from_zero else [])
    frame = _Frame(chart.width, chart.height, (min(x for x, _ in everything), max(x for x, _ in everything)), ys)
    parts = [*_axes(frame)]
    parts += [_mark(frame, x, text) for x, text in chart.marks]
    parts += [_line(frame, one) for one in drawn]
    parts += [_level(frame, *chart.level) for _ in levels if chart.level]
    parts += _hovers(frame, drawn)
    label = f"{chart.title}: " + "; ".join(_in_words(one) for one in drawn if one.points)
    box = f"0 0 {chart.width} {chart.height}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points: the lowest and the highest of each stretch, so that no spike is lost; both ends stay."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    buckets = (most - 2) // 2
    kept = [points[0]]
    for index in range(buckets):
        bucket = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        low, high = min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])
        kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], share: float = 0.02) -> list[Point]:
    """A centred moving average over `share` of the points."""
    reach = max(1, round(len(points) * share / 2))
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    averaged = []
    for index, (x, _) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)  # narrower at the ends, to stay centred
        averaged.append((x, (sums[index + near + 1] - sums[index - near]) / (2 * near + 1)))
    return averaged


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number as an axis or a tooltip shows it: 0.0003, 3.21, 12.5k, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


class _Frame:
    """From values to pixels."""

    left, right, top, bottom = 58, 14, 12, 30

    def __init__(self, width: int, height: int, xs: tuple[float, float], ys: Sequence[float]) -> None:
        self.width, self.height = width, height
        low, high = min(ys), max(ys)
        if low == high:
            low, high = low - (abs(low) * 0.5 or 1), high + (abs(high) * 0.5 or 1)
        margin = (high - low) * 0.05
        self.low, self.high = (low if low == 0 else low - margin), high + margin
        self.first, self.last = xs if xs[0] < xs[1] else (xs[0] - 1, xs[1] + 1)

    @property
    def floor(self) -> int:
        return self.height - self.bottom

    def x(self, value: float) -> float:
        return self.left + (value - self.first) / (self.last - self.first) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.floor - (value - self.low) / (self.high - self.low) * (self.floor - self.top)


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for value in ticks(frame.low, frame.high, max(2, frame.height // 55)):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    steps = ticks(frame.first, frame.last, max(2, frame.width // 130))
    for value in steps:
        x = frame.x(value)
        text = f"step {number(value)}" if value == steps[-1] else number(value)
        anchor = "end" if x > frame.width - frame.right - 24 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{frame.floor + 20}" text-anchor="{anchor}">{text}</text>')
    end = frame.width - frame.right
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{end}" y1="{frame.floor}" y2="{frame.floor}"/>')
    return parts


def _line(frame: _Frame, series: Series) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thin(series.points))
    return f'<polyline class="line {series.kind}" points="{path}"/>'


def _level(frame: _Frame, name: str, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line class="level" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tag" x="{frame.width - frame.right - 4}" y="{y - 6:.1f}" text-anchor="end">'
        f"{escape(name)} {number(value)}</text>"
    )


def _mark(frame: _Frame, at: float, text: str) -> str:
    x = frame.x(min(max(at, frame.first), frame.last))
    return (
        f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{frame.floor}"/>'
        f'<circle cx="{x:.1f}" cy="{frame.top}" r="4"/><title>{escape(text)}</title></g>'
    )


def _hovers(frame: _Frame, series: Sequence[Series]) -> list[str]:
    """Invisible columns, each with a dot on the lines and the values as a tooltip."""
    longest = max(series, key=lambda one: len(one.points)).points
    stride = max(1, math.ceil(len(longest) / MAX_HOVERS))
    chosen = longest[stride // 2 :: stride]
    width = max(2.0, (frame.width - frame.left - frame.right) / max(1, len(chosen)))
    values = [(one, dict(one.points)) for one in series]
    parts = []
    for step, _ in chosen:
        here = [(one, at[step]) for one, at in values if step in at]
        dots = "".join(
            f'<circle class="{one.kind}" cx="{frame.x(step):.1f}" cy="{frame.y(y):.1f}" r="3.5"/>' for one, y in here
        )
        text = f"step {step:,.0f}" + "".join(f"\n{one.name}: {number(y)}" for one, y in here)
        parts.append(
            f'<g class="hover"><rect x="{frame.x(step) - width / 2:.1f}" y="{frame.top}" width="{width:.1f}" '
            f'height="{frame.floor - frame.top}"/>{dots}<title>{escape(text)}</title></g>'
        )
    return parts


def _in_words(series: Series) -> str:
    (first, begin), (last, end) = series.points[0], series.points[-1]
    return f"{series.name} from {number(begin)} at step {first:.0f} to {number(end)} at step {last:.0f}"
