"""Search space: fields of a spec, each with a range or a list of values."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.spec.errors import Problem, SpecError

DIGITS = 4  # significant ones of a value from a range
MAX_DRAWS = 100  # until the values differ from those of all earlier trials
_RANGE = re.compile(r"(?P<low>[^.\s][^\s]*?)\.\.(?P<high>[^\s]+)(?P<log>\s+log)?")
_WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Axis:
    """A field and its values: `values`, or the range from `low` to `high`."""

    field: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False  # integers only
    log: bool = False  # uniform in the logarithm

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that are checked before a trial starts: all of a list, both ends of a range."""
        return self.values or (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """A value of the range as a spec has it."""
        return str(round(value)) if self.whole else f"{min(max(float(f'{value:.{DIGITS}g}'), self.low), self.high)!r}"

    def draw(self, source: random.Random) -> str:
        """A random value."""
        if self.values:
            return self.values[int(source.random() * len(self.values))]
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        if self.log:
            value = math.exp(math.log(low) + source.random() * (math.log(high) - math.log(low)))
        else:
            value = low + source.random() * (high - low)
        return self.text(min(math.floor(value), self.high) if self.whole else value)


def axes_of(over: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of items such as `model.layers=2,4`, `model.layers=2..8` and `model.layers=2..8 log`. Raises SpecError
    for an item without a valid range or list, and for a field that is named twice."""
    axes = [_axis(item) for item in over]
    fields = [axis.field for axis in axes]
    for field in fields:
        if fields.count(field) > 1:
            raise _refused(field, "is given twice", "give each field once")
    return tuple(axes)


def draw(axes: Sequence[Axis], seed: int, trial: int, former: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The overrides of a random trial, which depend on the seed and the number of the trial. None if the values of
    MAX_DRAWS draws are all those of `former` trials."""
    for attempt in range(MAX_DRAWS):
        source = random.Random(f"{seed}/{trial}/{attempt}")  # noqa: S311 - no secret
        changes = tuple(f"{axis.field}={axis.draw(source)}" for axis in axes)
        if changes not in former:
            return changes
    return None


def split_values(text: str) -> list[str]:
    """The values of an axis: parts between commas that are in no brackets, braces or quotes."""
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    return values


def _axis(item: str) -> Axis:
    field, equals, text = item.partition("=")
    if not equals or not all(part.strip() for part in split_values(text)):
        raise _refused(item, "is neither FIELD=VALUE,VALUE nor FIELD=LOW..HIGH", f"write it as {_EXAMPLE}")
    if ".." not in text or "[" in text:
        return Axis(field, tuple(split_values(text)))
    match = _RANGE.fullmatch(text.strip())
    try:
        low, high = (float(match[end]) for end in ("low", "high")) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if match is None or not math.isfinite(low + high):
        raise _refused(item, "is no range of numbers", f"write it as {_EXAMPLE}")
    if not low < high:
        raise _refused(item, "begins at or above its end", "write the smaller number first")
    if match["log"] and low <= 0:
        raise _refused(item, "has no logarithm at its beginning", "begin above 0, or leave out log")
    whole = all(_WHOLE.fullmatch(match[end]) for end in ("low", "high"))
    return Axis(field, low=low, high=high, whole=whole, log=bool(match["log"]))


_EXAMPLE = "training.optimizer.learning_rate=1e-5..1e-3 log"


def _refused(value: str, message: str, remedy: str) -> SpecError:
    return SpecError([Problem("--over", value, message, remedy)], "sweep")
