"""DeepSpeed loads what was exported for it, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import digest_of, open_checkpoint
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.exchange import UniversalCheckpoint, export_universal
from holdfast.model.initialise import parameter_shapes
from holdfast.spec.errors import DataError
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.checkpoint.saving import RUN, checkpointer, save, whole
from tests.train.ranks import join
from tests.train.test_engines import overrides
from tests.train.tiny_run import VOCABULARY, new_store, tiny_assignment, tiny_spec

PREFIXES = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def exported(store: Store, folder: Path, *, without: str = "-") -> dict[str, torch.Tensor]:
    """Save a state of the tiny model at step 3, and export it."""
    shapes = parameter_shapes(tiny_spec().model, VOCABULARY)
    names = [prefix + name for prefix in PREFIXES for name in shapes]
    values = {name: torch.rand(shapes[name.split(".", 2)[2] if name.startswith("optimizer.") else name])
              for name in names if not name.startswith(without)}  # fmt: skip
    save(checkpointer(store), 3, whole(values))
    export_universal(open_checkpoint(store, RUN, 3), folder)
    return values


def _deepspeed_loads(rank: int, size: int, folder: Path, engine_name: str) -> tuple[StateDigest, list[float]]:
    """Load the universal checkpoint with DeepSpeed's engine. Returns the digest of its state, and its steps."""
    from holdfast.engines.interface import build_engine

    join(folder, rank, size, always=True)
    engine: Any = build_engine(tiny_assignment(*overrides(engine_name, processes=size)), VOCABULARY, 0)
    inner = engine._engine
    inner._config.load_universal_checkpoint = True
    loaded, _ = inner.load_checkpoint(str(folder / "universal"))
    assert loaded is not None
    steps = {float(state["step"]) for state in engine._optimizer.optimizer.state.values()}
    return digest_of(engine.saved()), [*steps, inner.global_steps]


@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_deepspeed_loads_an_exported_checkpoint_to_the_bit(tmp_path: Path, engine: str) -> None:
    values = exported(new_store(tmp_path / "store"), tmp_path / "universal")
    assert (tmp_path / "universal" / "latest_universal").read_text() == "step-3"
    ((digest, steps),) = in_ranks(1, _deepspeed_loads, tmp_path, engine, seconds=120)
    assert digest == digest_of(whole(values))
    assert steps == [3.0, 3]


def test_an_export_is_read_back_and_another_optimizer_is_refused(tmp_path: Path) -> None:
    values = exported(new_store(tmp_path / "store"), tmp_path / "universal")
    source = UniversalCheckpoint(tmp_path / "universal")
    for name, value in values.items():
        assert torch.equal(torch.cat([box.data for box in source.boxes(name)]), value), name
    store = open_store(f"file://{tmp_path / 'store'}")
    with pytest.raises(DataError, match="is not empty"):
        export_universal(open_checkpoint(store, RUN, 3), tmp_path / "universal")
    with pytest.raises(DataError, match=r"has no exp_avg_sq; .* Use --to dcp"):
        exported(new_store(tmp_path / "other"), tmp_path / "out", without="optimizer.exp_avg_sq.")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/b", "..", ".hidden"])
def test_a_tensor_whose_name_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    store = new_store(tmp_path / "store")
    save(checkpointer(store), 3, whole({prefix + name: torch.rand(2) for prefix in PREFIXES}))
    with pytest.raises(DataError, match="is no name of a weight"):
        export_universal(open_checkpoint(store, RUN, 3), tmp_path / "some" / "universal")
    assert not (tmp_path / "some").exists()


def test_an_export_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file: name a folder"):
        exported(new_store(tmp_path / "store"), tmp_path / "file")
