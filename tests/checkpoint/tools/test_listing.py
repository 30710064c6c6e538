"""The facts that a listing shows of each checkpoint, and the rules that keep it."""

import pytest

from holdfast.checkpoint import Retention, pin
from holdfast.checkpoint.tools import list_checkpoints, retention_of
from holdfast.launch.launches import claim_launch
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from tests.checkpoint.saving import RUN, checkpointer, save, state


def test_the_listing_has_time_size_new_bytes_and_retention_reason(folder_store: Store) -> None:
    writer = checkpointer(folder_store)
    for step in (5, 6, 7):
        save(writer, step)
    pin(folder_store, RUN, 6, reason="the figures")
    five, six, seven = list_checkpoints(folder_store, RUN, Retention(1, 5))
    size = sum(tensor.nbytes for tensor in state(5).values())
    assert [(row.step, row.attempt, row.bytes) for row in (five, six, seven)] == [(n, 1, size) for n in (5, 6, 7)]
    assert five.fresh == size
    assert 0 < six.fresh <= size - state(5)["frozen"].nbytes
    assert five.kept == ("the first at or after a multiple of 5",)
    assert six.kept == ("pinned",)
    assert [pin.reason for pin in six.pins] == ["the figures"]
    assert seven.kept == ("one of the newest 1",)
    assert five.committed <= six.committed <= seven.committed


def test_damaged_checkpoints_are_listed_as_damaged(folder_store: Store) -> None:
    writer = checkpointer(folder_store)
    save(writer, 1)
    save(writer, 2)
    folder_store.put(layout.damaged(RUN, 1), folder_store.get(layout.checkpoint(RUN, 1)))
    folder_store.delete(layout.checkpoint(RUN, 1))
    folder_store.put(layout.checkpoint(RUN, 2), b"{")
    aside, torn = list_checkpoints(folder_store, RUN, Retention(9))
    assert (aside.step, torn.step) == (1, 2)
    assert "set aside" in aside.damaged
    assert "torn" in torn.damaged


def test_the_rules_are_those_of_the_newest_launch(folder_store: Store) -> None:
    assert retention_of(folder_store, RUN) == Retention(3)
    claim_launch(folder_store, RUN, {"checkpoint": {"keep_last": 7, "keep_every": 100, "keep_days": 2.0}})
    assert retention_of(folder_store, RUN) == Retention(7, 100, 2.0)
    with pytest.raises(MissingError, match="no checkpoint"):
        list_checkpoints(folder_store, RUN, Retention(1))
