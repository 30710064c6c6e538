"""Line charts as inline SVG. This module has the geometry, a template the markup, the page's style sheet the colors.

Thousands of steps draw fast, and thinning keeps every spike. Hovering over a chart shows its values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# HTML templates of the folder `templates`. Every inserted value is escaped.


def render(template: str, **values: Any) -> Markup:
    """Fill the template with values. Returns markup, so another template does not escape it again."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - autoescaped


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("holdfast.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = lambda value: f"{value:.1f}"
    environment.filters["times"] = lambda count: f"{count} time{'s' if count != 1 else ''}"
    return environment


Point = tuple[float, float]

MAX_POINTS = 600  # points of a drawn line
MAX_HOVERS = 120  # columns that react to the pointer


@dataclass(frozen=True)
class Series:
    """A line. `kind` is its class in the style sheet, which sets the color."""

    name: str
    points: Sequence[Point]
    kind: str = "first"


@dataclass(frozen=True)
class Chart:
    """One chart: lines over steps, an optional level (a dashed horizontal line), and marks at some steps."""

    title: str
    series: Sequence[Series]
    width: int = 1080
    height: int = 300
    from_zero: bool = False
    level: tuple[str, float] | None = None
    marks: Sequence[tuple[float, str]] = field(default=())


def draw_chart(chart: Chart) -> Markup:
    """The chart as an `<svg>` element; a sentence instead when there is nothing to draw."""
    drawn = [Series(series.name, finite(series.points), series.kind) for series in chart.series]
    everything = [point for series in drawn for point in series.points]
    if len(everything) < 2:
        return Markup('<p class="muted">{}: too few steps to draw.</p>').format(chart.title)
    levels = [chart.level[1]] if chart.level and math.isfinite(chart.level[1]) else []
    ys = [y for _, y in everything] + levels + ([0.0] if chart.from_zero else [])
    frame = _Frame(chart.width, chart.height, (min(x for x, _ in everything), max(x for x, _ in everything)), ys)
    level = None
    if chart.level and levels:
        level = {"y": frame.y(chart.level[1]), "text": f"{chart.level[0]} {number(chart.level[1])}"}
    return render(
        "chart.html",
        frame=frame,
        label=f"{chart.title}: " + "; ".join(_in_words(series) for series in drawn if series.points),
        rows=[(frame.y(value), number(value)) for value in ticks(frame.low, frame.high, max(2, frame.height // 55))],
        columns=_columns(frame),
        marks=[(frame.x(min(max(at, frame.first), frame.last)), text) for at, text in chart.marks],
        lines=[(series.kind, [(frame.x(x), frame.y(y)) for x, y in thin(series.points)]) for series in drawn],
        level=level,
        hovers=_hovers(frame, drawn),
    )


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """The values of `name` in the rows of a history, over their steps."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def finite(points: Sequence[Point]) -> list[Point]:
    """The points with finite coordinates."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Reduce to at most `most` points. Keeps both ends, and the lowest and highest point of each stretch."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    buckets = (most - 2) // 2
    thinned = [points[0]]
    for index in range(buckets):
        bucket = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        low, high = min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])
        thinned += [low] if low == high else sorted((low, high))
    return [*thinned, points[-1]]


def smooth(points: Sequence[Point], share: float = 0.02) -> list[Point]:
    """A centered moving average over `share` of the points."""
    reach = max(1, round(len(points) * share / 2))
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    averaged = []
    for index, (x, _) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)  # narrower at the ends, to stay centered
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
    """Maps values to pixels."""

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
    def end(self) -> int:
        return self.width - self.right

    @property
    def floor(self) -> int:
        return self.height - self.bottom

    def x(self, value: float) -> float:
        return self.left + (value - self.first) / (self.last - self.first) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.floor - (value - self.low) / (self.high - self.low) * (self.floor - self.top)


def _columns(frame: _Frame) -> list[tuple[float, str, str]]:
    """Position, text and anchor of each number under the step axis."""
    steps = ticks(frame.first, frame.last, max(2, frame.width // 130))
    return [
        (
            frame.x(value),
            f"step {number(value)}" if value == steps[-1] else number(value),
            "end" if frame.x(value) > frame.end - 24 else "middle",
        )
        for value in steps
    ]


def _hovers(frame: _Frame, series: Sequence[Series]) -> list[dict[str, Any]]:
    """Invisible columns, each with dots on the lines and the values as a tooltip."""
    longest = max(series, key=lambda one: len(one.points)).points
    stride = max(1, math.ceil(len(longest) / MAX_HOVERS))
    chosen = longest[stride // 2 :: stride]
    width = max(2.0, (frame.end - frame.left) / max(1, len(chosen)))
    values = [(drawn, dict(drawn.points)) for drawn in series]
    hovers = []
    for step, _ in chosen:
        points = [(drawn, at[step]) for drawn, at in values if step in at]
        hovers.append(
            {
                "x": frame.x(step) - width / 2,
                "width": width,
                "dots": [(drawn.kind, frame.x(step), frame.y(y)) for drawn, y in points],
                "text": f"step {step:,.0f}" + "".join(f"\n{drawn.name}: {number(y)}" for drawn, y in points),
            }
        )
    return hovers


def _in_words(series: Series) -> str:
    (first, begin), (last, end) = series.points[0], series.points[-1]
    return f"{series.name} from {number(begin)} at step {first:.0f} to {number(end)} at step {last:.0f}"


# Stacked bars as inline SVG: how several things (ranks, nodes) divide one whole, for comparison.
#
# The page's style sheet has the colors, in the order of the kinds. Hovering over a part shows its share.

WIDTH, LEFT, BAR, GAP = 1080, 76, 18, 6
MOST = 64  # bars of one picture


def draw_shares(bars: Sequence[tuple[str, Mapping[Any, float]]], kinds: Sequence[str], unit: str) -> Markup:
    """Draw one bar for each of `bars` (a label, and values by kind), all at the scale of the longest.

    `kinds` sets order and color. Returns a sentence when there is nothing to draw.
    """
    longest = max((sum(values.values()) for _, values in bars), default=0.0)
    if longest <= 0:
        return Markup('<p class="muted">Nothing was reported about it.</p>')
    drawn = []
    for index, (label, values) in enumerate(bars[:MOST]):
        total, at, parts = sum(values.values()), float(LEFT), []
        for number, kind in enumerate(kinds):
            if (value := values.get(kind, 0.0)) <= 0:
                continue
            width = (WIDTH - LEFT) * value / longest
            parts.append((number, at, width, f"{label}: {kind} {value:,.1f} {unit}, {100 * value / total:.1f} %"))
            at += width
        drawn.append((index * (BAR + GAP), label, parts))
    present = [(number, kind) for number, kind in enumerate(kinds) if any(values.get(kind) for _, values in bars)]
    height = len(drawn) * (BAR + GAP)
    return render("shares.html", bars=drawn, kinds=present, width=WIDTH, left=LEFT, bar=BAR, height=height)
