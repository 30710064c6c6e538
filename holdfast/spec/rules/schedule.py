"""Rules of `schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from zoneinfo import ZoneInfo, available_timezones

from holdfast.spec.cron import CronError, expand
from holdfast.spec.errors import Problem
from holdfast.spec.tree import Spec


def check_schedule(spec: Spec) -> Iterator[Problem]:
    """The cron expression and the time zone are valid, and only one kind of schedule is given."""
    schedule = spec.schedule
    if schedule.cron is not None and schedule.every_minutes is not None:
        yield Problem(
            "schedule.every_minutes",
            schedule.every_minutes,
            "is given together with schedule.cron",
            "keep one of the two",
        )
    if schedule.cron is not None:
        try:
            expand(schedule.cron)
        except CronError as error:
            yield Problem("schedule.cron", schedule.cron, str(error), error.remedy)
    try:
        ZoneInfo(schedule.timezone)
    except (KeyError, ValueError, OSError):
        from difflib import get_close_matches

        close = get_close_matches(schedule.timezone, sorted(available_timezones()), 1)
        yield Problem(
            "schedule.timezone", schedule.timezone, "is not an IANA time zone",
            f"did you mean {close[0]!r}?" if close else "use a name such as 'Europe/Berlin'",
        )  # fmt: skip
