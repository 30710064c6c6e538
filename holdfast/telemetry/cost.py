"""What a run took and what that cost: accelerator-hours, energy and money, from its events and the user's prices.

Promises that nothing is guessed: hours are the ledger's, energy is what accelerators' own meters told, and a price that
nobody gave is no part of a cost. What is not known comes with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.spec import Spec
from holdfast.spec.prices import Prices
from holdfast.spec.sizes import BatchSizes
from holdfast.telemetry.events import AttemptBegan, Event, SaveCommitted, TimeSpent
from holdfast.telemetry.ledger import Ledger

HOUR = 3600.0
JOULES = 3.6e6  # of a kilowatt-hour
MILLION = 1e6


@dataclass(frozen=True)
class Cost:
    """What a run took so far, in hours, energy and money. None: not known, and `unknown` says why."""

    accelerator: str  # as its driver calls it; empty where no attempt has begun
    accelerators: int  # ranks, the most at a time
    hours: float  # of all accelerators together, but those in which the job waited in a queue
    tokens: int  # of the steps that are saved
    kilowatt_hours: float | None  # of the accelerators, without their nodes
    metered: float  # share of `hours` in which a meter told them
    utilisation: float | None  # of the accelerators, in the mean of the moments at which they told it; from 0 to 1
    prices: Prices
    energy_unavailable: str  # why no energy is known

    @property
    def watts(self) -> float | None:
        """Of one accelerator, in the mean of the time that was metered."""
        metered = self.hours * self.metered
        return None if self.kilowatt_hours is None or metered <= 0 else 1000 * self.kilowatt_hours / metered

    @property
    def price(self) -> float | None:
        """Of all that is paid for; None if nothing is, or if a part of it is not known."""
        hours, energy = self.prices.accelerator_hour, self.prices.kilowatt_hour
        if (hours is None and energy is None) or (energy is not None and self.kilowatt_hours is None):
            return None
        return (hours or 0.0) * self.hours + (energy or 0.0) * (self.kilowatt_hours or 0.0)

    @property
    def price_per_million_tokens(self) -> float | None:
        """Of the tokens of the steps that are saved; None where there are none."""
        return None if self.price is None or not self.tokens else self.price / self.tokens * MILLION

    @property
    def carbon(self) -> float | None:
        """Grams of carbon dioxide."""
        rate = self.prices.carbon_per_kilowatt_hour
        return None if rate is None or self.kilowatt_hours is None else rate * self.kilowatt_hours

    @property
    def unknown(self) -> list[str]:
        """What is not known, and why."""
        return list(self._unknown())

    def _unknown(self) -> Iterator[str]:
        if self.kilowatt_hours is None:
            yield f"energy: {self.energy_unavailable or 'no rank has told any'}"
        if self.prices.accelerator_hour is None and self.prices.kilowatt_hour is None:
            yield "price: cluster.prices.accelerator_hour says what an hour costs"
        elif self.price is None:
            yield "price: a kilowatt-hour has one, and the energy is not known"

    def figures(self) -> dict[str, float]:
        """What is known of it, as metrics: `cost/…`."""
        known = {
            "accelerator_hours": self.hours, "kilowatt_hours": self.kilowatt_hours, "utilisation": self.utilisation,
            "price": self.price, "price_per_million_tokens": self.price_per_million_tokens,
            "carbon_grams": self.carbon,
        }  # fmt: skip
        return {f"cost/{name}": value for name, value in known.items() if value is not None}

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "accelerator": self.accelerator, "accelerators": self.accelerators, "accelerator_hours": self.hours,
            "tokens": self.tokens, "kilowatt_hours": self.kilowatt_hours, "metered": self.metered, "watts": self.watts,
            "utilisation": self.utilisation, "carbon_grams": self.carbon, "price": self.price,
            "price_per_million_tokens": self.price_per_million_tokens, "prices": self.prices.model_dump(),
            "unknown": self.unknown,
        }  # fmt: skip


def cost(spec: Spec, events: Sequence[Event], account: Ledger) -> Cost:
    """Of a run whose `events` have this ledger, by the prices of its spec."""
    sizes = BatchSizes.of(spec.training)
    began = [event for event in events if isinstance(event, AttemptBegan)]
    saved = [event.step for event in events if isinstance(event, SaveCommitted)]
    told = [event for event in events if isinstance(event, TimeSpent)]
    measured = [event for event in told if event.joules is not None]
    utilised = [event.utilisation for event in told if event.utilisation is not None]
    seconds = account.total - account.seconds.get("queue", 0.0)
    metered = sum(sum(event.seconds.values()) for event in measured)
    return Cost(
        accelerator=next((event.accelerator for event in reversed(began) if event.accelerator), ""),
        accelerators=len(account.ranks),
        hours=seconds / HOUR,
        tokens=(sizes.before(saved[-1]) - sizes.before(began[0].step)) * spec.model.context if saved and began else 0,
        kilowatt_hours=sum(event.joules or 0.0 for event in measured) / JOULES if measured else None,
        metered=min(1.0, metered / seconds) if seconds else 0.0,
        utilisation=sum(utilised) / len(utilised) if utilised else None,
        prices=spec.cluster.prices,
        energy_unavailable=next(
            (event.energy_unavailable for event in reversed(began) if event.energy_unavailable), ""
        ),
    )
