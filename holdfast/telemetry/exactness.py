"""Record of a verification: whether the training script of a run resumed with the bits of an undisturbed run."""

from pydantic import BaseModel

from holdfast.spec.errors import NotExactError
from holdfast.store import Store, layout
from holdfast.store.json_reading import find_json

_SHOWN = 5


class Resumption(BaseModel, frozen=True):
    """A run that stopped at a step and resumed in a new launch, compared with one that did not stop."""

    steps: int
    resumed_at: int
    rows: tuple[str, ...] = ()  # metrics that differ, in words
    values: tuple[str, ...] = ()  # paths of plain values that differ, in words
    tensors: tuple[str, ...] = ()  # names of tensors that differ

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return not (self.rows or self.values or self.tensors)

    def require(self) -> None:
        """Raises NotExactError with the first differences and the likely cause."""
        if self.is_exact:
            return
        named = {"metrics": self.rows, "values": self.values, "tensors": self.tensors}
        found = "; ".join(f"{kind}: {', '.join(names[:_SHOWN])}" for kind, names in named.items() if names)
        raise NotExactError(
            f"resumed at step {self.resumed_at}, the script differs from an undisturbed run by step {self.steps}. "
            f"{found}. Give session.restore every object that changes in training, draw random numbers only from "
            "torch, numpy, random or session.generator, and read the same data at the same step"
        )


class Exactness(BaseModel, frozen=True):
    """The verification of a script: its resumptions, in mid-epoch and at the end of an epoch if there was one."""

    code: str = ""  # digest of the bundle
    resumptions: tuple[Resumption, ...] = ()
    skipped: str = ""  # why nothing was compared
    seconds: float = 0.0  # time that it took
    run_id: str = ""  # the run that it was made for; other runs of the same code and environment use it

    @property
    def is_exact(self) -> bool:
        """Whether all resumptions were compared and equal."""
        return bool(self.resumptions) and all(one.is_exact for one in self.resumptions)

    def require(self) -> None:
        """Raises NotExactError for the first resumption that differs, and if nothing was compared."""
        if self.skipped:
            raise NotExactError(self.skipped)
        for one in self.resumptions:
            one.require()

    @property
    def text(self) -> str:
        """The result in words."""
        if self.skipped:
            return f"not verified: {self.skipped}"
        stops = " and ".join(str(one.resumed_at) for one in self.resumptions)
        result = "equal" if self.is_exact else "different"
        return f"resumed at step {stops}, {result} at step {self.resumptions[0].steps}"


def write_verification(store: Store, key: str, exactness: Exactness) -> None:
    """Record a verification for later runs of the same code and environment."""
    store.put(layout.verification(key), exactness.model_dump_json(indent=2).encode())


def find_verification(store: Store, key: str) -> Exactness | None:
    """The verification of a code and an environment; None if there is none."""
    return find_json(store, layout.verification(key), Exactness)


def write_exactness(store: Store, run_id: str, exactness: Exactness) -> None:
    """Record the verification of a run. A later one replaces it."""
    store.put(layout.exactness(run_id), exactness.model_dump_json(indent=2).encode())


def read_exactness(store: Store, run_id: str) -> Exactness | None:
    """The verification of a run; None if there is none."""
    return find_json(store, layout.exactness(run_id), Exactness)
