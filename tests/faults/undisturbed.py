"""The reference for disturbed runs: 40 steps of two ranks, in each of two layouts."""

from pathlib import Path

import pytest

from holdfast.store import open_store
from tests.faults.killing import outcome
from tests.once import once
from tests.train.tiny_run import new_store, tiny_spec, train_once

STEPS = 40


def overrides(strategy: str) -> tuple[str, ...]:
    """The overrides that affect the bits. The save times do not."""
    return (f"training.steps={STEPS}", "parallel.processes=2", f"parallel.strategy={strategy}")


def undisturbed_end(factory: pytest.TempPathFactory, strategy: str = "ddp") -> dict[str, object]:
    """The end of the undisturbed run: see `outcome`."""
    spec = tiny_spec(*overrides(strategy), "checkpoint.every_steps=20")

    def train(folder: Path) -> None:
        train_once(spec, new_store(folder / "store").url, folder / "home")

    return outcome(open_store(f"file://{once(factory, f'undisturbed-{strategy}', train) / 'store'}"), spec)[1]
