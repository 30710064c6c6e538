"""The cost of a run: accelerator-hours, energy and money, from its events and the user's prices.

Nothing is guessed. Hours are the ledger's, energy comes from the accelerators' own meters, and a price that is not set
is no part of a cost. Unknown values come with the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.spec import Spec
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.prices import Prices
from holdfast.telemetry.events import AttemptBegan, Event, SaveCommitted, TimeSpent
from holdfast.telemetry.ledger import Ledger

HOUR = 3600.0
JOULES = 3.6e6  # joules of a kilowatt-hour
MILLION = 1e6


@dataclass(frozen=True)
class Cost:
    """The cost of a run so far, in hours, energy and money. None: unknown, and `unknown` has the reason."""

    accelerator: str  # its driver's name for it; empty where no attempt has begun
    accelerators: int  # ranks, the most at a time
    hours: float  # hours of all accelerators together, except those in which the job waited in a queue
    tokens: int  # tokens of the steps that are saved
    kilowatt_hours: float | None  # energy of the accelerators, without their nodes
    metered: float  # share of `hours` that a meter covered
    utilisation: float | None  # mean of all readings of the accelerators, from 0 to 1
    prices: Prices
    energy_unavailable: str  # why the energy is unknown

    @property
    def watts(self) -> float | None:
        """Of one accelerator, in the mean of the metered time."""
        metered = self.hours * self.metered
        return None if self.kilowatt_hours is None or metered <= 0 else 1000 * self.kilowatt_hours / metered

    @property
    def price(self) -> float | None:
        """Of everything with a price; None if nothing has one, or if a part is unknown."""
        hours, energy = self.prices.accelerator_hour, self.prices.kilowatt_hour
        if (hours is None and energy is None) or (energy is not None and self.kilowatt_hours is None):
            return None
        return (hours or 0.0) * self.hours + (energy or 0.0) * (self.kilowatt_hours or 0.0)

    @property
    def price_per_million_tokens(self) -> float | None:
        """Of the tokens of the steps that are saved; None without any."""
        return None if self.price is None or not self.tokens else self.price / self.tokens * MILLION

    @property
    def carbon(self) -> float | None:
        """Grams of carbon dioxide."""
        rate = self.prices.carbon_per_kilowatt_hour
        return None if rate is None or self.kilowatt_hours is None else rate * self.kilowatt_hours

    @property
    def unknown(self) -> list[str]:
        """The unknown values, with reasons."""
        return list(self._unknown())

    def _unknown(self) -> Iterator[str]:
        if self.kilowatt_hours is None:
            yield f"energy: {self.energy_unavailable or 'no rank has reported any'}"
        if self.prices.accelerator_hour is None and self.prices.kilowatt_hour is None:
            yield "price: cluster.prices.accelerator_hour says what an hour costs"
        elif self.price is None:
            yield "price: a kilowatt-hour has one, and the energy is not known"

    def figures(self) -> dict[str, float]:
        """The known values, as metrics: `cost/…`."""
        values = {
            "accelerator_hours": self.hours,
            "kilowatt_hours": self.kilowatt_hours,
            "utilisation": self.utilisation,
            "price": self.price,
            "price_per_million_tokens": self.price_per_million_tokens,
            "carbon_grams": self.carbon,
        }
        return {f"cost/{name}": value for name, value in values.items() if value is not None}

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "accelerator": self.accelerator,
            "accelerators": self.accelerators,
            "accelerator_hours": self.hours,
            "tokens": self.tokens,
            "kilowatt_hours": self.kilowatt_hours,
            "metered": self.metered,
            "watts": self.watts,
            "utilisation": self.utilisation,
            "carbon_grams": self.carbon,
            "price": self.price,
            "price_per_million_tokens": self.price_per_million_tokens,
            "prices": self.prices.model_dump(),
            "unknown": self.unknown,
        }


def cost(spec: Spec, events: Sequence[Event], account: Ledger) -> Cost:
    """The cost of a run whose `events` have the ledger `account`, by the prices of its spec."""
    sizes = BatchSizes.of(spec.training)
    began = [event for event in events if isinstance(event, AttemptBegan)]
    saved_steps = [event.step for event in events if isinstance(event, SaveCommitted)]
    reports = [event for event in events if isinstance(event, TimeSpent)]
    energy_reports = [event for event in reports if event.joules is not None]
    utilised = [event.utilisation for event in reports if event.utilisation is not None]
    seconds = account.total - account.seconds.get("queue", 0.0)
    metered = sum(sum(event.seconds.values()) for event in energy_reports)
    return Cost(
        accelerator=next((event.accelerator for event in reversed(began) if event.accelerator), ""),
        accelerators=len(account.ranks),
        hours=seconds / HOUR,
        tokens=(sizes.before(saved_steps[-1]) - sizes.before(began[0].step)) * spec.model.context
        if saved_steps and began and spec.train.script is None
        else 0,
        kilowatt_hours=sum(event.joules or 0.0 for event in energy_reports) / JOULES if energy_reports else None,
        metered=min(1.0, metered / seconds) if seconds else 0.0,
        utilisation=sum(utilised) / len(utilised) if utilised else None,
        prices=spec.cluster.prices,
        energy_unavailable=next(
            (event.energy_unavailable for event in reversed(began) if event.energy_unavailable), ""
        ),
    )
