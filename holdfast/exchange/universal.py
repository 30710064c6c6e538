"""A checkpoint as DeepSpeed's universal checkpoint, which its engine loads at any number of ranks (ZeRO 1 to 3).

Each weight has a folder `zero/<name>/` with the weight and its moments, fp32. One tensor at a time is in memory. The
reader is `import_checkpoint.UniversalCheckpoint`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.exchange.import_checkpoint import LATEST_UNIVERSAL, MOMENTS, UNIVERSAL_FILES
from holdfast.model.initialise import AVERAGE
from holdfast.spec.errors import DataError
from holdfast.store.durable import whole_file, write

VERSION = "0.16.0"  # of DeepSpeed: the first one with these files; later ones read them
GROUPS = 64  # parameter groups at most. DeepSpeed loads the moments of as many groups as the checkpoint has
_IS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")  # it becomes the name of a folder
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # of ZeRO 1 and 2, and of 3


def export_universal(
    checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Write a checkpoint into an empty `folder`: `step-N/`, and `latest_universal`, which names it, last.

    Raises DataError if the folder is not empty, and for a state that is not that of AdamW on all weights. Raises
    DamageError for data that cannot be verified.
    """
    weights = _weights(checkpoint)
    if folder.is_file():
        raise DataError(f"{folder} is a file: name a folder")
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty: name one that is, or that does not exist")
    tag = f"step-{checkpoint.step}"
    zero, done = folder / tag / "zero", 0
    total = sum(checkpoint.tensors[name].elements for name in weights) * 4 * len(UNIVERSAL_FILES)
    updates = int(checkpoint.manifest.scalars.get("optimizer.step", checkpoint.step))
    for name in weights:
        (zero / name).mkdir(parents=True)
        for prefix, file in UNIVERSAL_FILES.items():
            tensor = checkpoint.tensor(prefix + name).float()
            torch.save({"param": tensor}, zero / name / file)
            done += tensor.nbytes
            progress(done, total)
        torch.save(_step(updates), zero / name / "step.pt")
    groups: list[dict[str, Any]] = [{} for _ in range(GROUPS)]  # rates and decays stay those of the loading engine
    state = {"state": {0: {"step": _step(updates)}}, "param_groups": groups}
    torch.save(
        {"ds_version": VERSION, "param_groups": groups, "optimizer_state_dict": state}, zero / "optimizer_state.pt"
    )
    for file in MODEL_STATES:
        torch.save(_model_states(updates), folder / tag / file)
    with whole_file(folder / LATEST_UNIVERSAL, tag) as descriptor:
        write(descriptor, [memoryview(tag.encode())])


def _weights(checkpoint: Checkpoint) -> list[str]:
    """The names of the weights. Raises DataError for a weight without both moments."""
    names = [name for name in checkpoint.tensors if not name.startswith(("optimizer.", AVERAGE))]
    for name in names:
        if not _IS_NAME.fullmatch(name):
            raise DataError(f"{name!r} is no name of a weight; this checkpoint cannot be exported")
        missing = next((prefix for prefix in MOMENTS if prefix + name not in checkpoint.tensors), None)
        if missing is not None:
            raise DataError(
                f"{name} has no {missing.removeprefix('optimizer.').rstrip('.')}; a universal checkpoint holds the "
                "state of AdamW on all weights. Use --to dcp, which holds any state"
            )
    return names


def _step(updates: int) -> torch.Tensor:
    return torch.tensor(float(updates))


def _model_states(updates: int) -> dict[str, Any]:
    """The counters of DeepSpeed's engine. It takes no weights from this file."""
    counters = {"global_steps": updates, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    return {"module": {}, "lr_scheduler": None, "ds_version": VERSION, **counters}
