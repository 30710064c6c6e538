"""The replicas detect a rank with faulty hardware and report it before its bits reach a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import read_manifest
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.collectives import Gang
from holdfast.rank.replicas import suspected
from holdfast.spec import ExitCode, run_id
from holdfast.spec.errors import HoldfastError
from holdfast.store import open_store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import join, launch, train_in_ranks
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec


def overrides(size: int) -> tuple[str, ...]:
    return (f"parallel.processes={size}", "training.global_batch=6", "training.micro_batch=1", "training.steps=6")


def _train_with_a_bad_rank(
    rank: int, size: int, url: str, folder: Path, knobs: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Rank 1 flips one bit of one weight in the fourth step. Returns how this rank ended."""
    from holdfast.engines.torch.engine import TorchEngine
    from holdfast.rank.preemption import PreemptionSignal
    from holdfast.rank.worker import work

    sound, steps = TorchEngine.step, []

    def step(self: TorchEngine, rows: torch.Tensor, learning_rate: float, *before_update: Any) -> object:
        output = sound(self, rows, learning_rate, *before_update)
        steps.append(output)
        if rank == 1 and len(steps) == 4:
            box = next(box for box in self.boxes() if box.name == "model.layers.1.mlp.up_proj.weight")
            box.data.view(torch.int32)[3, 5] ^= 1
        return output

    TorchEngine.step = step  # type: ignore[method-assign,assignment]
    folder.mkdir(exist_ok=True)
    join(folder, rank, size, always=False)
    store, spec = open_store(url), tiny_spec(*overrides(size), *knobs)
    number = Gang().from_rank_0(lambda: launch(store, spec), int)
    leave = PreemptionSignal()
    leave.listen()
    try:
        work(store, run_id(spec, DATASET_ID), number, leave)
    except HoldfastError as error:
        return int(error.exit_code), str(error)
    return 0, ""


@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_in_one_replica_names_the_rank_and_is_never_saved(tmp_path: Path, size: int) -> None:
    store = new_store(tmp_path / "store")
    endings = in_ranks(size, _train_with_a_bad_rank, store.url, tmp_path / "r", seconds=200)
    assert checkpoint_steps(store, run_id(tiny_spec(*overrides(size)), DATASET_ID)) == [3]
    codes, words = zip(*endings, strict=True)
    assert len(set(words)) == 1
    if size == 2:
        assert codes == (ExitCode.WRONG_ARITHMETIC,) * 2
        assert "none is in the majority: rank 0 on " in words[0]
    else:
        assert codes == (ExitCode.LOST_PEER, ExitCode.WRONG_ARITHMETIC, ExitCode.LOST_PEER)
        assert words[0].startswith("step 6: rank 1 on ")
        assert "rank 0" not in words[0]
    assert "model.layers.1.mlp.up_proj.weight" in words[0]


def test_replicas_of_shards_are_compared_with_their_like_alone(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    knobs = ("parallel.strategy=fsdp", "parallel.replicas=2", "training.global_batch=8")
    endings = in_ranks(4, _train_with_a_bad_rank, store.url, tmp_path / "r", knobs, seconds=200)
    assert [code for code, _ in endings] == [ExitCode.LOST_PEER, ExitCode.WRONG_ARITHMETIC] * 2
    assert "none is in the majority: rank 1 on " in endings[0][1] and "rank 3 on " in endings[0][1]
    assert "rank 0" not in endings[0][1] and "rank 2" not in endings[0][1]


def test_a_flipped_bit_is_found_at_the_next_digest_long_before_the_next_save(tmp_path: Path) -> None:
    store, knobs = new_store(tmp_path / "store"), ("checkpoint.every_steps=6", "checkpoint.digest_every=2")
    endings = in_ranks(2, _train_with_a_bad_rank, store.url, tmp_path / "r", knobs, seconds=200)
    assert [(code, words.partition(":")[0]) for code, words in endings] == [(208, "step 4")] * 2
    assert checkpoint_steps(store, run_id(tiny_spec(*overrides(2), *knobs), DATASET_ID)) == []


@pytest.mark.parametrize(
    ("held", "ranks"), [("aab", [2]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3]), ("abaaa", [1]), ("abca", [0, 1, 2, 3])]
)
def test_suspects_are_those_outside_the_majority_or_all_of_them(held: str, ranks: list[int]) -> None:
    assert suspected(held) == ranks


def test_the_history_has_the_digest_that_the_manifest_of_the_same_step_has(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    for strategy in ("ddp", "fsdp"):
        knobs = (*overrides(2), f"parallel.strategy={strategy}", "checkpoint.digest_every=2")
        assert train_in_ranks(2, store.url, tmp_path / strategy, [(knobs, strategy, None)]) == [""]
        identity = run_id(tiny_spec(*knobs), DATASET_ID, strategy)
        rows = {row["step"]: row["state_digest"] for row in read_history(store, identity) if "state_digest" in row}
        assert list(rows) == [2, 4, 6]
        assert rows[6] == read_manifest(store, identity, 6).state_digest
        assert len(set(rows.values())) == 3
