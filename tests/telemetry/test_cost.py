"""Duration and cost of a run: hours of the ledger, reported energy, given prices, and nothing else."""

import math

import pytest

from holdfast.spec import Spec
from holdfast.telemetry.cost import Cost, cost
from holdfast.telemetry.events import AttemptBegan, Event, LaunchPending, TimeSpent
from holdfast.telemetry.ledger import ledger
from tests.telemetry.test_ledger import at, killed_once
from tests.train.tiny_run import tiny_spec

PRICES = ("cluster.prices.accelerator_hour=36", "cluster.prices.currency=EUR")
TOKENS_PER_STEP = 8 * 16


def of(events: list[Event], *overrides: str) -> Cost:
    spec: Spec = tiny_spec(*overrides)
    assert spec.training.global_batch * spec.model.context == TOKENS_PER_STEP
    return cost(spec, events, ledger(events))


def metered() -> list[Event]:
    """Two ranks on an H100 each at 500 W; rank 1 is killed at second 28 and has reported up to 27."""

    def stamped(event: Event) -> Event:
        update: dict[str, object] = {}
        if isinstance(event, AttemptBegan):
            update = {"accelerator": "NVIDIA H100 80GB HBM3"}
        if isinstance(event, TimeSpent) and "start" not in event.seconds:
            update = {"joules": 500 * sum(event.seconds.values()), "utilisation": 0.25 + event.rank / 2}
        return event.model_copy(update=update)

    return [stamped(event) for event in killed_once()]


def test_the_cost_is_the_hours_of_the_ledger_at_the_price_of_the_spec() -> None:
    events = killed_once()
    cost = of(events, *PRICES)
    seconds = ledger(events).total
    assert (cost.accelerators, cost.hours) == (2, seconds / 3600)
    assert cost.price == seconds / 100  # 36 an hour
    saved_steps = 10  # the step of the only checkpoint
    assert cost.tokens == saved_steps * TOKENS_PER_STEP
    assert cost.price_per_million_tokens == pytest.approx(seconds / 100 / (saved_steps * TOKENS_PER_STEP) * 1e6)
    assert cost.figures()["cost/price"] == cost.price


def test_unknown_energy_and_prices_are_reported_and_not_guessed() -> None:
    begin = at(7, AttemptBegan(world=2, step=0, steps=40, energy_unavailable="there is no accelerator"), 1)
    cost = of([*killed_once()[:3], begin])
    assert (cost.kilowatt_hours, cost.price, cost.carbon, cost.tokens) == (None, None, None, 0)
    assert cost.unknown == [
        "energy: there is no accelerator", "price: cluster.prices.accelerator_hour says what an hour costs",
    ]  # fmt: skip
    assert set(cost.figures()) == {"cost/accelerator_hours"}
    assert of(killed_once(), "cluster.prices.kilowatt_hour=0.3").price is None  # a part of the price is unknown


def test_energy_is_the_meters_and_has_its_price_and_its_carbon() -> None:
    events = metered()
    cost = of(events, "cluster.prices.kilowatt_hour=0.5", "cluster.prices.carbon_per_kilowatt_hour=400")
    measured = [event for event in events if isinstance(event, TimeSpent) and event.joules is not None]
    joules = math.fsum(event.joules or 0 for event in measured)
    assert cost.kilowatt_hours == pytest.approx(joules / 3.6e6)
    assert cost.metered == pytest.approx(joules / 500 / ledger(events).total)
    assert 0.5 < cost.metered < 1  # without starts, and without what the killed rank did not report
    assert cost.watts == pytest.approx(500)
    assert cost.utilisation == pytest.approx(sum(event.utilisation or 0 for event in measured) / len(measured))
    assert cost.price == pytest.approx(joules / 3.6e6 * 0.5)
    assert cost.carbon == pytest.approx(joules / 3.6e6 * 400)
    assert cost.accelerator == "NVIDIA H100 80GB HBM3"


def test_time_in_a_queue_costs_nothing() -> None:
    events = killed_once()
    waiting = sorted([*events, at(1.5, LaunchPending(reason="queue"))], key=lambda event: event.time)
    account = ledger(waiting)
    assert account.seconds["queue"] > 0
    assert of(waiting).hours == pytest.approx((account.total - account.seconds["queue"]) / 3600)


def test_a_run_that_began_at_anothers_step_has_not_paid_for_its_tokens() -> None:
    events = [
        event.model_copy(update={"step": 4}) if isinstance(event, AttemptBegan) else event for event in killed_once()
    ]
    assert of(events, *PRICES).tokens == (10 - 4) * TOKENS_PER_STEP
