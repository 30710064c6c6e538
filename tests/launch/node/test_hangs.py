"""Hang detection from the state of ranks as a node's watchdog sees it: which rank hangs, and after how long."""

import pytest

from holdfast.launch.node import hangs
from holdfast.launch.node.hangs import Watched, judge
from holdfast.runtime.heartbeat import Seen
from holdfast.telemetry.phases import PHASES, Phase

USUAL = (0.5,) * 8
SOON = 3 * 0.5 + 1.0  # seconds until a hang is reported


def rank(
    number: int,
    phase: Phase = "data",
    *,
    quiet: float = 0.0,
    idle: float | None = None,
    stopped: float = 0.0,
    waiting: bool = False,
    step: int = 10,
    steps: tuple[float, ...] = USUAL,
    world: int = 3,
    requests: int = 0,
    allowed: float = 0.0,
) -> Watched:
    """A rank that sleeps in a phase."""
    state = Seen(number, world, step, PHASES.index(phase), waiting, requests, 1000, steps, allowed)
    return Watched(state, quiet, quiet if idle is None else idle, stopped)


def waiters(quiet: float, *numbers: int, **more: object) -> list[Watched]:
    return [rank(number, "backward", quiet=quiet, waiting=True, **more) for number in numbers]  # type: ignore[arg-type]


def suspects(*ranks: Watched) -> list[int]:
    """The ranks, of three, that count as hung."""
    decision = judge(ranks)
    return [] if decision is None else [suspect.seen.rank for suspect in decision.suspects]


def test_a_rank_that_sleeps_while_its_peers_wait_is_a_suspect_within_three_steps_and_a_second() -> None:
    assert suspects(rank(1, quiet=SOON - 0.1), *waiters(SOON - 0.2, 0, 2)) == [1]
    assert suspects(rank(1, quiet=SOON - 0.8), *waiters(SOON - 0.8, 0, 2)) == []


def test_a_rank_that_waits_in_another_phase_than_its_peers_is_a_suspect() -> None:
    assert suspects(rank(1, "forward", quiet=SOON, waiting=True), *waiters(SOON, 0, 2)) == [1]


def test_a_rank_that_waits_is_no_suspect_while_its_own_threads_want_a_core() -> None:
    behind = rank(1, "forward", quiet=60.0, idle=0.5, waiting=True)
    assert suspects(behind, *waiters(60.0, 0, 2)) == []


def test_where_all_wait_in_the_same_place_the_network_has_some_seconds_more() -> None:
    assert suspects(*waiters(SOON + hangs.ALL_WAIT, 0, 1, 2)) == [0, 1, 2]
    assert suspects(*waiters(SOON, 0, 1, 2)) == []


def test_a_stopped_rank_is_named_wherever_it_is() -> None:
    assert set(hangs.ORDER) == set(PHASES)
    for phase in PHASES:
        stopped = rank(1, phase, quiet=SOON, stopped=SOON, waiting=phase == "backward")
        assert suspects(stopped, *waiters(SOON, 0, 2)) == [1]
    early = rank(1, "restore", quiet=11.0, stopped=11.0, steps=())
    assert suspects(early, *waiters(11.0, 0, 2, steps=())) == [1]


def test_a_stopped_gang_is_suspect_after_ten_minutes_and_a_single_rank_after_ten_seconds() -> None:
    assert suspects(*(rank(number, quiet=590.0, stopped=590.0) for number in range(3))) == []
    assert suspects(*(rank(number, quiet=601.0, stopped=601.0) for number in range(3))) == [0, 1, 2]
    assert suspects(rank(0, quiet=9.0, stopped=9.0, world=1)) == []
    assert suspects(rank(0, quiet=11.0, stopped=11.0, world=1)) == [0]


def test_a_rank_that_computes_or_waits_for_a_core_is_no_suspect_for_two_minutes() -> None:
    assert suspects(rank(1, "backward", quiet=100.0, idle=0.5), *waiters(100.0, 0, 2)) == []
    assert suspects(rank(1, "backward", quiet=121.0, idle=0.5), *waiters(121.0, 0, 2)) == [1]


def test_ranks_without_waiting_peers_are_suspects_after_two_minutes() -> None:
    assert suspects(*(rank(number, quiet=110.0) for number in range(3))) == []
    assert suspects(*(rank(number, quiet=121.0) for number in range(3))) == [0, 1, 2]


def test_there_is_no_suspect_while_another_rank_progresses() -> None:
    assert suspects(rank(1, quiet=SOON), rank(0, "forward", quiet=0.1), *waiters(SOON, 2)) == []


@pytest.mark.parametrize(
    "at_work",
    [
        rank(1, "save", quiet=600.0),
        rank(1, "build", quiet=3600.0, steps=()),
        rank(1, "restore", quiet=3600.0, steps=()),
        rank(1, "start", quiet=900.0, steps=()),
        rank(1, "forward", quiet=600.0, idle=100.0, steps=()),  # the first steps compile
        rank(1, "data", quiet=100.0, requests=1),  # a slow store
        rank(1, "generate", quiet=100.0, requests=1),
        rank(1, "generate", quiet=890.0, requests=1, allowed=600.0),  # a slow server of answers
        rank(1, "generate", quiet=1400.0, requests=1, allowed=1200.0, steps=()),
    ],
    ids=lambda one: one.phase,
)
def test_a_slow_phase_is_no_hang(at_work: Watched) -> None:
    assert suspects(at_work, *waiters(at_work.quiet, 0, 2, steps=at_work.seen.steps)) == []
    for_ever = Watched(at_work.seen, 10_000.0, 10_000.0)
    assert suspects(for_ever, *waiters(10_000.0, 0, 2, steps=at_work.seen.steps)) == [1]


def test_a_rank_that_sleeps_in_a_first_step_compiles_nothing() -> None:
    """For example, a rank that waits for a thread which got no memory to start."""
    assert suspects(rank(1, "check", quiet=119.0, steps=()), *waiters(119.0, 0, 2, steps=())) == []
    assert suspects(rank(1, "check", quiet=121.0, steps=()), *waiters(121.0, 0, 2, steps=())) == [1]
    meeting = rank(1, "forward", quiet=600.0, waiting=True, steps=())
    assert suspects(meeting, *waiters(600.0, 0, 2, steps=())) == []


def test_steps_of_changing_length_make_it_patient() -> None:
    uneven = (0.5,) * 7 + (4.0,)
    assert suspects(rank(1, quiet=7.0, steps=uneven), *waiters(7.0, 0, 2, steps=uneven)) == []
    assert suspects(rank(1, quiet=8.1, steps=uneven), *waiters(8.1, 0, 2, steps=uneven)) == [1]


def test_each_node_of_a_gang_judges_its_own_ranks() -> None:
    assert judge([rank(1, quiet=SOON, world=8), *waiters(SOON, 0, world=8)]) is not None
    assert judge(waiters(1000.0, 0, 1, world=8)) is None
    assert judge([rank(1, quiet=SOON, world=8)]) is None  # no rank is known to wait


def test_the_words_name_rank_node_place_and_time() -> None:
    decision = judge([rank(1, "optimizer", quiet=2.4), *waiters(2.4, 0, 2)])
    assert decision is not None
    assert decision.words("node-a") == (
        "rank 1 hangs on node-a, in the phase optimizer of step 11, since 2.4 s: it sleeps; 2 more wait"
    )


def unheard(number: int, seconds: float, steps: tuple[float, ...] = USUAL) -> Watched:
    """A rank of a node that has sent nothing for that many seconds."""
    state = rank(number, "forward", steps=steps).seen
    return Watched(state, seconds, seconds, seconds, unheard=True)


def test_a_node_silent_for_a_minute_counts_as_hung_and_not_before() -> None:
    quiet = waiters(59.0, 0, 2)
    assert judge([unheard(1, 59.0), *quiet], hangs.ACROSS_NODES) is None
    decision = judge([unheard(1, 60.0), *quiet], hangs.ACROSS_NODES)
    assert decision is not None
    assert decision.words("node-b").endswith("nothing is heard of its node; 2 more wait")
    starting = waiters(59.0, 0, 2, steps=())  # the first steps compile, and machines are busy
    assert judge([unheard(1, 59.0, steps=()), *starting], hangs.ACROSS_NODES) is None


def test_a_silent_node_is_not_hung_while_its_peers_progress() -> None:
    assert judge([unheard(1, 300.0), *waiters(0.1, 0, 2)], hangs.ACROSS_NODES) is None
    assert judge([unheard(1, 300.0), *waiters(0.1, 0), *waiters(300.0, 2)], hangs.ACROSS_NODES) is None
