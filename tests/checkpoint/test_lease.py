"""The lease of a collector: one holder at a time, measured with the contender's clock only."""

import json

import pytest

from holdfast.checkpoint.gc import LEASE_SECONDS, Lease, LostLeaseError
from holdfast.store import Store
from tests.checkpoint.test_commit import Hurry

KEY = "runs/run/collector.json"


def lease(store: Store, clock: Hurry, attempt: int = 1) -> Lease:
    return Lease(store, KEY, attempt, clock)


def test_a_holder_that_renews_is_never_followed_however_long_it_holds(folder_store: Store) -> None:
    clock = Hurry()
    holder, other = lease(folder_store, clock), lease(folder_store, clock)
    assert holder.take()
    for _ in range(8):
        assert not other.take()
        clock.sleep(LEASE_SECONDS - 1)
        holder.renew()
    assert not other.take()
    holder.release()
    assert other.take()


@pytest.mark.parametrize(("seconds", "free"), [(LEASE_SECONDS - 0.001, False), (LEASE_SECONDS, True)])
def test_a_silent_holder_is_followed_after_the_time_since_it_was_first_seen_so(
    folder_store: Store, seconds: float, free: bool
) -> None:
    clock = Hurry()
    holder, other = lease(folder_store, clock), lease(folder_store, clock)
    assert holder.take()
    clock.sleep(10 * LEASE_SECONDS)
    assert not other.take()  # the contender does not know yet how long the holder has been silent
    clock.sleep(seconds)
    assert other.take() is free
    for act in (holder.renew, holder.release) if free else ():
        with pytest.raises(LostLeaseError):
            act()
    if free:
        other.renew()  # the attempt of the former holder changed nothing
    else:
        holder.renew()


def test_a_holder_that_comes_back_in_the_last_moment_begins_a_new_time(folder_store: Store) -> None:
    clock = Hurry()
    holder, other = lease(folder_store, clock), lease(folder_store, clock)
    assert holder.take()
    assert not other.take()
    clock.sleep(LEASE_SECONDS - 1)
    holder.renew()
    assert not other.take()
    clock.sleep(LEASE_SECONDS - 1)
    assert not other.take()
    clock.sleep(1)
    assert other.take()


@pytest.mark.parametrize(("held_by", "free"), [(1, True), (2, False), (3, False)])
def test_attempt_2_takes_the_lease_of_an_older_attempt_immediately_and_no_other(
    folder_store: Store, held_by: int, free: bool
) -> None:
    clock = Hurry()
    holder = lease(folder_store, clock, held_by)
    assert holder.take()
    assert lease(folder_store, clock, 2).take() is free
    assert holder.take() is (not free)  # a holder can take its lease again


@pytest.mark.parametrize("torn", [b"", b"{", b"{}", b'{"owner": "a", "attempt": 1}', b'{"held": "x"}'])
def test_a_torn_lease_record_does_not_block_a_new_holder(folder_store: Store, torn: bytes) -> None:
    folder_store.put(KEY, torn)
    assert lease(folder_store, Hurry()).take()


def test_one_of_two_holders_of_the_same_lease_record_wins(folder_store: Store) -> None:
    clock = Hurry()
    first, second = lease(folder_store, clock), lease(folder_store, clock)
    assert first.take()
    first.release()
    version = folder_store.get_versioned(KEY)[1]
    assert second.take()
    first._version = version
    with pytest.raises(LostLeaseError):
        first.renew()
    assert json.loads(folder_store.get(KEY))["owner"] == second._owner
