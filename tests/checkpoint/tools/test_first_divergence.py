"""The first divergence of two runs: the step from their histories, the tensor from the nearest checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Attempt, Checkpointer, Retention
from holdfast.checkpoint.tools import Side, find_divergence
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import segment
from tests.checkpoint.saving import DESCRIBE, state, whole


def write(store: Store, run_id: str, steps: list[int], parts_at: int = 99, *, silent: bool = False) -> Side:
    """A run with checkpoints at `steps`. Its state differs from step `parts_at` on. Its figures differ too, unless
    `silent`.
    """
    writer = Checkpointer(store, Attempt(run_id, 1), Retention(100), describe=DESCRIBE)
    for step in steps:
        rows = [
            {"step": at, "time": at, "loss": 1 / at + (1e-9 if at >= parts_at and not silent else 0), "tokens": at * 8}
            | {"grad_norm": 1.0, "learning_rate": 0.1}
            for at in range(1, step + 1)
        ]
        tensors = state(step)
        if step >= parts_at:
            tensors["matrix"] = torch.nextafter(tensors["matrix"], torch.full((7, 5), 9.0)).where(
                torch.arange(35).view(7, 5) >= 13, tensors["matrix"]
            )
        writer.save(step, whole(tensors), {"optimizer.step": step}, segment(run_id, 0, rows, 1))
        writer.wait()
    return Side(store, run_id)


def test_the_first_step_the_tensor_and_the_element_are_named_and_the_nearest_checkpoints(tmp_path: Path) -> None:
    stores = [open_store(f"file://{tmp_path / name}") for name in ("one", "other")]
    first = write(stores[0], "one", [3, 6, 8, 9, 12])
    second = write(stores[1], "other", [3, 5, 6, 9, 12, 15], parts_at=8)
    divergence = find_divergence(first, second)
    assert (divergence.none, divergence.first, divergence.compared, divergence.steps) == (False, 8, 12, (12, 15))
    assert [(figure.name, figure.values) for figure in divergence.figures] == [("loss", (1 / 8, 1 / 8 + 1e-9))]
    assert (divergence.equal_at, divergence.differs_at) == (6, 9)
    assert divergence.difference is not None
    (tensor,) = divergence.difference.tensors
    assert (tensor.name, tensor.first, tensor.elements, tensor.ulps) == ("matrix", (2, 3), 22, 1)


def test_runs_of_different_length_compare_up_to_the_shorter_and_states_alone_may_differ(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    base, longer = write(store, "one", [3, 6, 9]), write(store, "longer", [4, 6, 9, 12])
    divergence = find_divergence(base, longer)
    assert (divergence.none, divergence.compared, divergence.equal_at, divergence.steps) == (True, 9, 9, (9, 12))
    silently = find_divergence(base, write(store, "silently", [6, 9], parts_at=7, silent=True))
    assert (silently.none, silently.first, silently.equal_at, silently.differs_at) == (False, None, 6, 9)
    store.delete(layout.checkpoint("one", 9))  # collected: the histories still diverge at 5, but no tensor is named
    early = find_divergence(replace(base), write(store, "early", [5, 9], parts_at=5))
    assert (early.first, early.differs_at, early.difference) == (5, None, None)
    with pytest.raises(MissingError, match="run none has no checkpoint"):
        find_divergence(base, Side(store, "none"))
