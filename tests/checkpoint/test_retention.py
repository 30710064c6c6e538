"""Which checkpoints retention keeps: by count, by age, as milestones, and because of pins."""

import os
import time

import pytest

from holdfast.checkpoint import Retention, list_pins, pin, unpin
from holdfast.checkpoint.retention import DAY_SECONDS, checkpoint_steps, checkpoint_times
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from tests.checkpoint.saving import RUN, checkpointer, save


def daily(*steps: int) -> dict[int, float]:
    """One checkpoint per day, the last one today."""
    return {step: 1e9 + DAY_SECONDS * day for day, step in enumerate(steps)}


def test_the_newest_checkpoints_are_kept_in_any_listing_order() -> None:
    assert Retention(1).kept({3: 0.0, 9: 0.0, 6: 0.0}) == [9]
    assert Retention(3, 4, 1).kept({}) == []


def test_a_milestone_is_the_first_checkpoint_at_or_after_a_multiple() -> None:
    assert Retention(1, 10).kept(daily(4, 8, 12, 16, 20, 30, 33)) == [12, 20, 30, 33]


def test_the_young_stay_by_the_clock_of_the_store_alone() -> None:
    assert Retention(1, None, 2).kept(daily(1, 2, 3, 4, 5)) == [3, 4, 5]
    assert Retention(1, None, 0.5).kept(daily(1, 2, 3)) == [3]


def test_each_retention_reason_is_a_readable_text() -> None:
    reasons = Retention(1, 5, 1).reasons(daily(5, 6, 7, 8), pinned=[6, 99])
    assert reasons == {
        5: ("the first at or after a multiple of 5",),
        6: ("pinned",),
        7: ("younger than 1 days",),
        8: ("one of the newest 1", "younger than 1 days"),
    }


def test_a_pinned_checkpoint_survives_collections_until_its_last_pin_is_removed(folder_store: Store) -> None:
    writer = checkpointer(folder_store, keep_last=1)
    save(writer, 1)
    pin(folder_store, RUN, 1, reason="the paper's figures")
    pin(folder_store, RUN, 1, "registered-tiny-3")
    save(writer, 2)
    save(writer, 3)
    assert checkpoint_steps(folder_store, RUN) == [1, 3]
    assert [(pin.step, pin.name, pin.reason) for pin in list_pins(folder_store, RUN)] == [
        (1, "person", "the paper's figures"),
        (1, "registered-tiny-3", ""),
    ]
    unpin(folder_store, RUN, 1)
    save(writer, 4)
    assert checkpoint_steps(folder_store, RUN) == [1, 4]
    folder_store.put(layout.pin(RUN, 1, "registered-tiny-3"), b"torn")  # the pin still holds
    save(writer, 5)
    assert checkpoint_steps(folder_store, RUN) == [1, 5]
    unpin(folder_store, RUN, 1, "registered-tiny-3")
    save(writer, 6)
    assert checkpoint_steps(folder_store, RUN) == [6]


def test_a_sweep_keeps_what_is_young_by_the_store(folder_store: Store) -> None:
    writer = checkpointer(folder_store, keep_last=1, keep_days=1.0)
    for step in (1, 2):
        save(writer, step)
    path = folder_store.local_path(layout.checkpoint(RUN, 1))
    assert path is not None
    os.utime(path, (0, time.time() - 2 * DAY_SECONDS))
    save(writer, 3)
    assert list(checkpoint_times(folder_store, RUN)) == [2, 3]


def test_pinning_a_missing_checkpoint_lists_the_existing_ones(folder_store: Store) -> None:
    save(checkpointer(folder_store), 3)
    with pytest.raises(MissingError, match=r"no checkpoint at step 4 .*it has: 3"):
        pin(folder_store, RUN, 4)
    assert list_pins(folder_store, RUN) == []
    with pytest.raises(MissingError, match="not pinned by person"):
        unpin(folder_store, RUN, 3)
    with pytest.raises(ValueError, match="names no pin"):
        pin(folder_store, RUN, 3, "../../spec")
