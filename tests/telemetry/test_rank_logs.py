"""Output of ranks in the store, and its readers: live, torn, with the store away, and bounded."""

from collections.abc import Callable, Iterator

import pytest

from holdfast.spec.errors import MissingError, StoreUnreachableError
from holdfast.store import Store, layout, log_stream
from holdfast.store.log_stream import PIECE_BYTES
from holdfast.telemetry.rank_logs import RankLog, new_stream, rank_lines, rank_streams, ranks_with_logs

RUN = "0123456789abcdef"


class Away:
    """A store whose writes fail while it is `away`."""

    def __init__(self, store: Store) -> None:
        self._store, self.away = store, False

    def __getattr__(self, name: str) -> object:
        def refuse(*_: object) -> None:
            raise StoreUnreachableError(f"{name}: away")

        return refuse if self.away and name in ("put", "list") else getattr(self._store, name)


def a_log(store: object, rank: int = 0, launch: int = 1) -> RankLog:
    return RankLog(lambda: store, RUN, new_stream(rank, launch, 7, node="node"))  # type: ignore[arg-type,return-value]


def printed(
    log: RankLog, text: str, *, attempt: int | None = None, ended: bool = False, code: int | None = None
) -> None:
    log.add(text.encode())
    fields = {"attempt": attempt, "ended": 1.0 if ended else None, "code": code}
    log.describe(log.stream.model_copy(update=fields))
    assert log.flush(last=ended)


def test_a_log_is_read_while_it_grows_and_after_the_end(store: Store) -> None:
    log = a_log(store)
    texts = iter([("two\nthr", False), ("ee\n", True)])

    def running() -> bool:
        text, has_ended = next(texts)
        printed(log, text, attempt=4, ended=has_ended)
        return True

    printed(log, "one\n", attempt=4)
    assert list(rank_lines(store, RUN, 0, attempt=4, running=running, poll_seconds=0)) == ["one", "two", "three"]
    assert list(rank_lines(store, RUN, 0)) == ["one", "two", "three"]


def test_a_line_that_was_never_ended_is_kept_to_its_last_byte(store: Store) -> None:
    log = a_log(store)
    printed(log, "begins\nentering the allreduce of buck", ended=True, code=137)
    assert list(rank_lines(store, RUN, 0)) == ["begins", "entering the allreduce of buck"]
    (stream,) = rank_streams(store, RUN, 0)
    assert stream.code == 137


def test_what_hangs_in_the_middle_of_a_line_is_seen_up_to_its_last_word(store: Store) -> None:
    log = a_log(store)
    log.add(b"waiting for ")
    log.add(b"rank3")
    assert log.flush()
    assert list(rank_lines(store, RUN, 0)) == ["waiting for "]


def test_secrets_are_hidden_wherever_the_text_was_cut(store: Store) -> None:
    log = a_log(store)
    for part in ("reads https://user:pa", "ss@host/path?token=ab", "cdef and ", "AWS_SECRET_ACCESS_KEY=xy", "z\n"):
        log.add(part.encode())
        log.flush()
    printed(log, "password=torn", ended=True)
    text = "\n".join(rank_lines(store, RUN, 0))
    assert text == "reads https://host/path?token=(hidden) and AWS_SECRET_ACCESS_KEY=(hidden)\npassword=(hidden)"
    for info in store.list(layout.rank_log(RUN)):
        assert not any(secret in store.get(info.key) for secret in (b"pass@", b"abcdef", b"xyz", b"torn"))


def test_an_unreachable_store_is_waited_for_and_nothing_is_lost(store: Store) -> None:
    unreachable = Away(store)
    log = a_log(unreachable)
    printed(log, "before\n")
    unreachable.away = True
    for number in range(100):
        log.add(f"line {number}\n".encode())
        assert not log.flush()
    unreachable.away = False
    printed(log, "after\n", ended=True)
    assert list(rank_lines(store, RUN, 0)) == ["before", *(f"line {number}" for number in range(100)), "after"]


def test_what_does_not_fit_while_the_store_is_away_is_lost_from_its_oldest_lines_and_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_stream, "MAX_WAITING", 1000)
    unreachable = Away(store)
    log = a_log(unreachable)
    printed(log, "before\n")
    unreachable.away = True
    for number in range(200):
        log.add(f"line {number:04d}\n".encode())
        log.flush()
    unreachable.away = False
    assert log.flush(last=True)
    lines = list(rank_lines(store, RUN, 0))
    assert lines[0] == "before"
    assert lines[2] == f"[holdfast: {100 * 10} bytes of this log were lost while the store was away]"
    assert lines[3:] == [f"line {number:04d}" for number in range(100, 200)]


def test_a_long_log_keeps_its_head_and_tail_and_marks_the_gap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(log_stream, "FIRST_PIECES", 2)
    monkeypatch.setattr(log_stream, "KEPT_PIECES", 6)
    log = a_log(store)
    for number in range(2000):
        log.add(f"line {number:04d}\n".encode())
        if number % 10 == 0:
            log.flush()
    assert log.flush(last=True)
    pieces = [info for info in store.list(layout.rank_log(RUN)) if info.key.endswith(".log")]
    assert len(pieces) <= 6
    lines = list(rank_lines(store, RUN, 0))
    gap = lines.index("[holdfast: what was printed here is not kept; see docs/logs.md]")
    assert lines[: gap - 1] == [f"line {number:04d}" for number in range(gap - 1)]
    assert lines[gap + 1 :] == [f"line {number:04d}" for number in range(2000 - len(lines) + gap + 1, 2000)]
    assert gap > 150
    assert len(lines) - gap > 250


def test_a_process_that_prints_all_the_time_is_written_once_a_flush(store: Store) -> None:
    keys: list[str] = []

    class Busy(Away):
        def put(self, key: str, data: bytes) -> None:
            keys.append(key)
            if len(keys) < 20:
                log.add(b"printed while it is written\n")
            store.put(key, data)

    log = a_log(Busy(store))
    printed(log, "first\n")
    assert [key.rpartition("/")[2] for key in keys] == ["stream.json", "000000.log"]
    printed(log, "last\n", ended=True)
    assert {"first", "last"} <= {*rank_lines(store, RUN, 0)}


def test_a_piece_is_closed_when_it_is_full_and_one_word_without_end_is_cut(store: Store) -> None:
    log = a_log(store)
    word = "x" * (2 * PIECE_BYTES + 5)
    printed(log, word + "\n" + "y" * 10, ended=True)
    assert list(rank_lines(store, RUN, 0)) == [word, "y" * 10]


def test_of_a_rank_only_the_newest_processes_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_stream, "KEPT_STREAMS", 3)
    for launch in range(1, 7):
        printed(a_log(store, launch=launch), f"launch {launch}\n", ended=True)
    printed(a_log(store, rank=1), "another rank\n", ended=True)
    assert [stream.launch for stream in rank_streams(store, RUN, 0)] == [4, 5, 6]
    assert ranks_with_logs(store, RUN) == [0, 1]


@pytest.fixture
def several(store: Store) -> Iterator[Callable[..., list[str]]]:
    """A run of three launches; the last one never formed a gang."""
    for launch, attempt in ((1, 1), (2, 2), (3, None)):
        for rank in (0, 1):
            printed(a_log(store, rank, launch), f"rank {rank} launch {launch}\n", attempt=attempt, ended=True)
    yield lambda rank, **which: list(rank_lines(store, RUN, rank, **which))


def test_an_attempt_or_a_launch_or_the_newest_process_is_shown(several: Callable[..., list[str]]) -> None:
    assert several(1, attempt=2) == ["rank 1 launch 2"]
    assert several(1, launch=1) == ["rank 1 launch 1"]
    assert several(0) == ["rank 0 launch 3"]


@pytest.mark.parametrize(
    ("rank", "which", "message"),
    [
        (1, {"attempt": 9}, "in attempt 9 is kept; there is launch 1 attempt 1, launch 2 attempt 2, launch 3"),
        (1, {"launch": 9}, "in launch 9 is kept"),
        (5, {}, "nothing that rank 5 printed is kept; there is something of ranks 0 to 1"),
    ],
)
def test_a_missing_log_is_reported_with_the_existing_ones(
    several: Callable[..., list[str]], rank: int, which: dict[str, int], message: str
) -> None:
    with pytest.raises(MissingError, match=message):
        several(rank, **which)


def test_a_run_without_logs_raises_missing_error(store: Store) -> None:
    with pytest.raises(MissingError, match="no rank has printed anything yet"):
        list(rank_lines(store, RUN, 0))


def test_following_continues_with_the_log_of_the_next_process(store: Store) -> None:
    printed(a_log(store, launch=1), "old\n", ended=True)
    printed(a_log(store, launch=2), "second\n", ended=True)
    looks = iter([True, True, False])

    def running() -> bool:
        if (continues := next(looks)) is False:
            printed(a_log(store, launch=3), "third\n", ended=True)
        return continues

    assert list(rank_lines(store, RUN, 0, running=running, poll_seconds=0)) == ["second", "third"]
