"""Promotions in order: the next registration completes the work of a dead or slow one."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from holdfast.components.register import promotion
from holdfast.components.register.promotion import promote_in_order
from holdfast.runtime.environment import tracking_uri
from holdfast.store import Store
from holdfast.tracking import Champion, champion, connect, promote, rollback
from tests.checkpoint.breaking_store import BreakingStore, Killed
from tests.registered import register_version

MODEL = "story"


@pytest.fixture(autouse=True)
def three_versions(home: Path, store: Store) -> None:
    for number in range(1, 4):
        assert register_version(store, MODEL, str(number), f"runs/{number}/export/x/", f"state-{number}") == number


def replaced_champions(store: Store, version: int) -> list[int | None]:
    """The champions that the version replaced, in order."""
    champions: list[int | None] = []
    promote_in_order((store,), MODEL, version, tracking_uri(), lambda now: champions.append(number_of(now)))
    return champions


def number_of(now: Champion | None) -> int | None:
    return None if now is None else now.version


def die_after_the_claim(store: Store, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(promotion, "promote", dying)
        replaced_champions(store, version)


def test_a_claim_whose_process_died_is_carried_out_before_the_next_is_judged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replaced_champions(store, 1) == [None]
    die_after_the_claim(store, 2, monkeypatch)
    assert number_of(champion(MODEL, store)) == 1
    assert replaced_champions(store, 3) == [2]
    current = champion(MODEL, store)
    assert current is not None
    assert (current.version, current.tags["holdfast.replaced_champion"]) == (3, "2")


@pytest.mark.slow
def test_killed_at_any_operation_and_repeated_it_is_the_champion(store: Store) -> None:
    replaced_champions(store, 1)
    whole = BreakingStore(store, kill=False)
    replaced_champions(whole, 2)
    for at in range(whole.operations):
        replaced_champions(store, 1)
        with pytest.raises(Killed):
            replaced_champions(BreakingStore(store, at, kill=True), 2)
        replaced_champions(store, 2)
        assert number_of(champion(MODEL, store)) == 2


@pytest.mark.parametrize("made_by", ["promote", "promote_in_order"])
@pytest.mark.parametrize("after", [False, True])
def test_a_promotion_killed_at_any_mlflow_write_leaves_a_champion(
    store: Store, monkeypatch: pytest.MonkeyPatch, made_by: str, after: bool
) -> None:
    """The former champion is recorded before the alias moves. Otherwise, a crash between the two would leave no
    rollback.
    """
    replaced_champions(store, 1)
    act = partial(promote, MODEL, 2, store) if made_by == "promote" else partial(replaced_champions, store, 2)
    writes = ("set_registered_model_alias", "set_model_version_tag", "delete_registered_model_alias",
              "delete_model_version_tag")  # fmt: skip
    for fatal in range(10):
        seen = [0]

        def watched(write: Any, seen: list[int] = seen, fatal: int = fatal) -> Any:
            def act(*arguments: Any, **options: Any) -> Any:
                number, seen[0] = seen[0], seen[0] + 1
                if number == fatal and not after:
                    raise Killed
                result = write(*arguments, **options)
                if number == fatal:
                    raise Killed
                return result

            return act

        with monkeypatch.context() as patch:
            for name in writes:
                patch.setattr(MlflowClient, name, watched(getattr(MlflowClient, name)))
            with suppress(Killed):
                act()
        current = champion(MODEL, store)
        assert current is not None
        assert current.version in (1, 2)
        if current.version == 2:
            assert current.tags["holdfast.replaced_champion"] == "1"
            assert rollback(MODEL, store).version == 1
        if seen[0] <= fatal:
            break
    assert 1 <= fatal < 9


def test_a_claim_that_was_carried_out_does_not_undo_what_a_person_chose_since(store: Store) -> None:
    replaced_champions(store, 1)
    replaced_champions(store, 2)
    promote(MODEL, 1, store)
    assert replaced_champions(store, 3) == [1]


def test_a_claim_of_a_deleted_version_does_not_block_a_promotion(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replaced_champions(store, 1)
    die_after_the_claim(store, 2, monkeypatch)
    connect().delete_model_version(MODEL, "2")
    assert replaced_champions(store, 3) == [1]
    assert number_of(champion(MODEL, store)) == 3
    assert "is not made champion any more" in caplog.text


def test_a_slow_promotion_keeps_the_newer_champion(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_champions(store, 1)
    original = promotion.promote

    def slow(model: str, version: int, where: Store, uri: str) -> Champion:
        if version == 2 and not others:
            others.append(3)
            assert replaced_champions(store, 3) == [2]  # it completes the claim of 2 before its own
        return original(model, version, where, uri)

    others: list[int] = []
    monkeypatch.setattr(promotion, "promote", slow)
    assert replaced_champions(store, 2) == [1]
    assert number_of(champion(MODEL, store)) == 3
