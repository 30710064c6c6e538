"""Cron expressions, in a dialect that every engine reads in the same way.

- Five fields: minute (0-59), hour (0-23), day of the month (1-31), month (1-12 or jan-dec), weekday (0-7 or sun-sat; 0
  and 7 are Sunday).
- A field is a list of `*`, numbers and ranges `a-b`. `*` and a range may have a step, as in `*/15`.
- If both day fields are restricted, a day matches if either of them names it. `*`, also as `*/1` or in a list, is no
  restriction, but `1-31` is one (as in robfig/cron, which Argo and KFP use).

Promises that `expand` returns only numbers, lists and `*`, and that the schedule fires.
"""

import re
from dataclasses import dataclass

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # days of each month in its longest year
SHORTHANDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?", re.ASCII)


class CronError(ValueError):
    """An expression that is not in this dialect, or never fires. `remedy` names a replacement."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class _Field:
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()  # names of the numbers, from `first_word` on
    first_word: int = 0

    def number(self, word: str) -> int:
        """The number for a word of the field."""
        if word.lower() in self.words:
            return self.words.index(word.lower()) + self.first_word
        if not word.isdecimal() or len(word) > 2 or not self.least <= int(word) <= self.most:
            names = f" or {self.words[0]}-{self.words[-1]}" if self.words else ""
            raise CronError(
                f"has {word!r} as {self.name}",
                f"use {self.least}-{self.most}{names}, or lists, ranges and steps of them",
            )
        return int(word)


FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS, 1),
    _Field("weekday", 0, 7, _WEEKDAYS),
)


def expand(cron: str) -> str:
    """The same schedule with only numbers, lists and `*`. Raises CronError."""
    if (word := cron.strip().lower()) in SHORTHANDS:
        raise CronError("is a shorthand that not every engine supports", f"write {SHORTHANDS[word]!r}")
    texts = cron.split()
    if len(texts) != len(FIELDS):
        raise CronError("is not a five-field cron expression", "use minute hour day month weekday, such as '0 3 * * 1'")
    values = [_values(field, text) for field, text in zip(FIELDS, texts, strict=True)]
    values[4] = sorted({value % 7 for value in values[4]})
    full = [set(range(field.least, field.most + 1)) for field in FIELDS[:4]] + [set(range(7))]
    fields = [
        "*" if set(numbers) == all_numbers else ",".join(map(str, numbers))
        for numbers, all_numbers in zip(values, full, strict=True)
    ]
    stars = [any(part in ("*", "*/1") for part in texts[index].split(",")) for index in (2, 4)]
    if not any(stars) and "*" in (fields[2], fields[4]):  # either field may match, and one always does
        fields[2] = fields[4] = "*"
    if fields[4] == "*" and all(min(values[2]) > _LONGEST[month - 1] for month in values[3]):
        raise CronError("never fires, because no such month has that day", "use a day that the month has")
    return " ".join(fields)


def _values(field: _Field, text: str) -> list[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or (match["first"] == "*" and match["last"]):
            raise CronError(
                f"has {part!r} as {field.name}, which not every engine supports",
                "use numbers, lists, ranges and steps, such as 0,30 or 8-18/2; name the days instead of L, W and #",
            )
        first, last, step = match["first"], match["last"], match["step"]
        if first == "*":
            begin, end = field.least, field.most if field.name != "weekday" else 6
        else:
            begin = field.number(first)
            end = field.number(last) if last else begin
            if step and not last:
                raise CronError(
                    f"has {part!r} as {field.name}, which engines interpret differently",
                    f"use {first}-{field.most}/{step}, or {first}",
                )
        if end < begin:
            raise CronError(
                f"has the range {part!r} as {field.name}, whose end is before its start",
                f"use two ranges: {first}-{field.most if field.name != 'weekday' else 6},{field.least}-{last}",
            )
        if step is not None and (len(step) > 2 or not 1 <= int(step) <= field.most):
            raise CronError(f"has the step {step} in {field.name}", f"use a step from 1 to {field.most}")
        numbers.update(range(begin, end + 1, int(step or 1)))
    return sorted(numbers)
