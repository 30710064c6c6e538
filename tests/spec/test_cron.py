"""One dialect of cron: accepted schedules mean the same to every engine, and the rest is refused with a remedy."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipelines.backends.argo import schedules
from holdfast.pipelines.backends.kubeflow.schedule import trigger_of
from holdfast.spec import SpecError, parse_spec
from holdfast.spec.cron import CronError, expand


@pytest.mark.parametrize(
    ("cron", "expanded"),
    [
        ("0 3 * * 1", "0 3 * * 1"),
        ("*/15 * * * *", "0,15,30,45 * * * *"),
        ("30 2 1 JAN,jul *", "30 2 1 1,7 *"),
        ("0 3 * * 7", "0 3 * * 0"),
        ("0 3 * * 5-7", "0 3 * * 0,5,6"),
        ("0 3 * * 0-7", "0 3 * * *"),
        ("0 8-18/5,22 * * mon-fri", "0 8,13,18,22 * * 1,2,3,4,5"),
        ("00 03 */1 1-12 *", "0 3 * * *"),
        ("0 0 29 2 *", "0 0 29 2 *"),
        ("0 0 31 2,3 *", "0 0 31 2,3 *"),
        ("0 0 30 2 1", "0 0 30 2 1"),
        ("0 0 */1 * 0", "0 0 * * 0"),
        ("0 0 1-31 * 0", "0 0 * * *"),
        ("0 0 5 * sun-sat", "0 0 * * *"),
    ],
)
def test_a_schedule_is_the_same_numbers_on_argo_and_on_kubeflow(cron: str, expanded: str) -> None:
    spec = parse_spec("{name: a, data: {sources: [{uri: x}]}}", [f"schedule.cron='{cron}'"])
    assert schedules(spec) == [expanded]
    assert trigger_of(spec).cron_schedule.cron == f"0 {expanded}"


@pytest.mark.parametrize(
    ("cron", "message", "remedy"),
    [
        ("0 3 L * *", "'L' as day of the month", "1-31"),
        ("0 3 * * 1#2", "not every engine supports", "name the days"),
        ("0 3 * * L5", "'L5' as weekday", "sun-sat"),
        ("0 3 15W * *", "'15W'", "1-31"),
        ("0 22-2 * * *", "end is before its start", "use two ranges: 22-23,0-2"),
        ("0 3 * * fri-mon", "end is before its start", "fri-6,0-mon"),
        ("R(0-10) 3 * * *", "not every engine supports", "numbers, lists"),
        ("H 3 * * *", "'H' as minute", "0-59"),
        ("? 3 * * *", "not every engine supports", "numbers"),
        ("5/15 3 * * *", "interpret differently", "5-59/15"),
        ("*/0 * * * *", "step 0", "1 to 59"),
        ("*/99 * * * *", "step 99", "1 to 59"),
        ("60 * * * *", "'60' as minute", "0-59"),
        ("0 0 * * 8", "'8' as weekday", "0-7"),
        ("0 0 0 * *", "'0' as day of the month", "1-31"),
        ("0 0 * foo *", "'foo' as month", "jan-dec"),
        ("0 0 * mon *", "'mon' as month", "jan-dec"),
        ("1,,2 0 * * *", "'' as minute", "numbers"),
        ("-1 0 * * *", "'-1' as minute", "numbers"),
        ("1-2-3 0 * * *", "'1-2-3' as minute", "numbers"),
        ("*-5 0 * * *", "'*-5' as minute", "numbers"),
        ("\u0663 0 * * *", "as minute", "numbers"),
        ("0 0 30 2 *", "never fires", "the month has"),
        ("0 0 31 feb,apr,jun,sep,nov *", "never fires", "the month has"),
        ("@hourly", "shorthand", "'0 * * * *'"),
        ("@Weekly", "shorthand", "'0 0 * * 0'"),
        ("@every 5m", "five-field", "'0 3 * * 1'"),
        ("TZ=UTC 0 3 * * *", "five-field", "'0 3 * * 1'"),
        ("", "five-field", "'0 3 * * 1'"),
    ],
)
def test_a_cron_expression_that_engines_interpret_differently_is_refused(cron: str, message: str, remedy: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec("{name: a, data: {sources: [{uri: x}]}}", [f"schedule.cron='{cron}'"])
    (problem,) = error.value.problems
    assert problem.field == "schedule.cron"
    assert message in problem.message
    assert remedy in problem.remedy


def _part(least: int, most: int) -> st.SearchStrategy[str]:
    number = st.integers(least, most)
    ranges = st.tuples(number, number).filter(lambda two: two[0] < two[1]).map(lambda two: f"{two[0]}-{two[1]}")
    stepped = st.tuples(st.one_of(st.just("*"), ranges), st.integers(1, most)).map(lambda two: f"{two[0]}/{two[1]}")
    return st.one_of(st.just("*"), number.map(str), ranges, stepped)


expressions = st.tuples(
    *(
        st.lists(_part(*limits), min_size=1, max_size=3).map(",".join)
        for limits in ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    )
).map(" ".join)


@given(expressions)
def test_the_numbers_are_those_of_another_reader_of_cron(cron: str) -> None:
    from croniter import croniter

    try:
        expanded = expand(cron)
    except CronError as error:
        assert "never fires" in str(error)
        return
    # Each field on its own: croniter and robfig/cron disagree on which day fields restrict, so the rule is repeated
    # here.
    fields = [re.sub(r"\*/1(?=,|$)", "*", field) for field in cron.split()]
    alone = [
        croniter.expand(" ".join(["*"] * at + [field] + ["*"] * (4 - at)))[0][at] for at, field in enumerate(fields)
    ]
    full = ["*" in numbers or len(numbers) == size for numbers, size in zip(alone, (60, 24, 31, 12, 7), strict=True)]
    restricted = ["*" not in fields[at].split(",") for at in (2, 4)]
    # If both day fields restrict, one match is enough; here one always matches.
    if all(restricted) and (full[2] or full[4]):
        full[2] = full[4] = True
    fields_written = ["*" if every else ",".join(map(str, numbers)) for every, numbers in zip(full, alone, strict=True)]
    assert expanded == " ".join(fields_written)
    assert expand(expanded) == expanded
    assert not set(expanded) - set("0123456789,* ")


@pytest.mark.parametrize("minutes", [0, 525_601, 10**15])
def test_an_interval_is_a_year_at_most(minutes: int) -> None:
    with pytest.raises(SpecError, match=r"every_minutes.*out of range"):
        parse_spec("{name: a, data: {sources: [{uri: x}]}}", [f"schedule.every_minutes={minutes}"])
