"""No wait for a copy lasts forever. A state that does not fit the agent's protocol is refused before training."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import writer
from holdfast.checkpoint.agent import buffers, protocol
from holdfast.checkpoint.agent.protocol import VARIABLE, Outcome
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.spec.errors import (
    DataError,
    HoldfastError,
    HungError,
    NoSpaceError,
    SpecError,
    StoreUnreachableError,
)
from holdfast.store import Store
from tests.checkpoint.breaking_store import BreakingStore
from tests.checkpoint.saving import RUN, blank, checkpointer, state, whole

FIRST = lambda _: None  # noqa: E731 - the first state is as it is


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies that block until this event is set, with a short timeout."""
    let_go, fill = threading.Event(), buffers.Staging.fill

    def slow(self: Any, *arguments: Any) -> Any:
        let_go.wait(600)
        return fill(self, *arguments)

    monkeypatch.setattr(buffers.Staging, "fill", slow)
    monkeypatch.setattr(buffers, "COPY_SECONDS", 0.2)
    monkeypatch.setattr(writer, "HAND_OVER_SECONDS", 0.2)
    return let_go


def test_a_stuck_staging_copy_ends_the_rank_and_names_the_step(
    folder_store: Store, stuck: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    saving = checkpointer(folder_store)
    saving.save(3, whole(state(3)), {})
    with pytest.raises(HungError, match=r"step 3: the copy of 9 boxes of the state was not made in 0\.2 s"):
        saving.wait_for_staging()
    with pytest.raises(HungError, match="step 3"):  # a late copy may still write to the buffer, so no later save runs
        saving.save(6, whole(state(6)), {})
    with caplog.at_level(logging.ERROR, "holdfast.checkpoint"):
        ending = threading.Thread(target=saving.close, daemon=True)
        ending.start()
        while "was not handed over" not in caplog.text and ending.is_alive():
            ending.join(0.05)
    assert "steps without an outcome: 3" in caplog.text
    stuck.set()
    ending.join(180)
    assert not ending.is_alive()


@pytest.mark.parametrize(
    ("error", "free"),
    [(HungError, {1}), (StoreUnreachableError, {0, 1}), (NoSpaceError, {0, 1}), (DataError, {0, 1})],
)
def test_a_buffer_that_a_hung_copy_may_still_be_read_from_is_never_filled_again(
    folder_store: Store, error: type[HoldfastError], free: set[int]
) -> None:
    """A hung copy may resume later and write a mix of this step and the next one."""
    store_resumes, started = threading.Event(), threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "put" and "/packs/" in key:
            started.set()
            assert store_resumes.wait(180)

    saving = checkpointer(BreakingStore(folder_store, kill=False, before=before), max_lag_steps=100)
    saving.save(3, whole(state(3)), {})
    assert started.wait(180)
    assert saving._free == {1}
    saving._ended(Outcome(step=3, what="failed", error=error.__name__, reason="no answer"))
    assert saving._free == free
    saving._ended(Outcome(step=3, what="durable"))  # it arrives late and frees nothing
    assert saving._free == free
    store_resumes.set()
    saving.close()


def test_a_table_of_boxes_that_no_message_holds_is_refused_before_the_first_step(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no-agent"))
    monkeypatch.setattr(protocol, "MAX_MESSAGE", 1000)
    with pytest.raises(SpecError, match=r"9 boxes of a rank(?s:.*)spread the state over more") as error:
        checkpointer(folder_store).restore(blank(whole(state(0))), FIRST)
    assert error.value.problems[0].field == "parallel"
    monkeypatch.delenv(VARIABLE)  # without an agent, boxes need no message
    assert checkpointer(folder_store).restore(blank(whole(state(0))), FIRST) == 0


def test_a_save_message_over_the_limit_fails_as_a_spec_error_and_not_as_a_lost_agent(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no-agent"))
    monkeypatch.setattr(protocol, "MAX_MESSAGE", 10_000)
    monkeypatch.setattr(writer, "ROOM", 1000)
    saving = checkpointer(folder_store)
    saving.restore(blank(whole(state(0))), FIRST)
    saving.save(3, whole(state(3)), {}, {"metrics": "x" * 10_000})
    with pytest.raises(SpecError, match="more than the 10,000 that the checkpoint agent takes"):
        saving.wait()
    assert checkpoint_steps(folder_store, RUN) == []
    saving.close()
