"""Separate processes for the test of a model of realistic size: `python -m tests.train.large WHAT STORE`.

The production code writes the checkpoint, with one writer per tensor. So even this test does not need the memory of a
training of such a model.
"""

import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3

from holdfast.checkpoint import Attempt, TensorBox, read_manifest
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.dataset import Dataset
from holdfast.model.exported import exported_files
from holdfast.model.hugging_face import read_hugging_face
from holdfast.model.initialise import parameter_shapes
from holdfast.runtime.environment import cache_dir
from holdfast.store import Store, layout, open_store
from tests.train.tiny_run import DATASET_ID, VOCABULARY, tiny_spec, write_dataset

RUN = "8888777766665555"
STEP = 12
MODEL = {"layers": 6, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "context": 16}
MODEL |= json.loads(os.environ.get("HOLDFAST_LARGE", "{}"))
SPEC = tiny_spec(*(f"model.{name}={value}" for name, value in MODEL.items()))
SHAPES = parameter_shapes(SPEC.model, VOCABULARY)
BYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())
EXPORTS = layout.exports(RUN)


def tensor(name: str) -> torch.Tensor:
    """A tensor of the model, with different bits per tensor."""
    seed = int.from_bytes(blake3(name.encode()).digest(4), "little")
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def digest(data: torch.Tensor) -> str:
    return str(blake3(data.numpy().data.cast("B")).hexdigest())


def checkpoint(store: Store) -> dict[str, int]:
    """Write the checkpoint."""
    write_dataset(store)
    attempt, committer = Attempt(RUN, 1), Committer(store, Attempt(RUN, 1), len(SHAPES))
    for writer, name in enumerate(SHAPES):
        ShardWriter(store, attempt, writer).write(STEP, [TensorBox.whole(name, tensor(name))])
    for writer in range(len(SHAPES)):
        committer.lead(STEP, writer)
    fields = {"dataset_id": DATASET_ID, "layout": {}, "random": {}, "history": ((0, 1),)}
    return {"bytes": committer.commit(STEP, fields, {}).fresh}


def export(store: Store) -> dict[str, int]:
    """Do what the launcher's pod does after the last step, with its usual imports."""
    import kubernetes  # noqa: F401
    import mlflow  # noqa: F401

    from holdfast.components.train.step import export as export_from_step

    before = peak()
    manifest = read_manifest(store, RUN, STEP)
    export_digest = export_from_step(SPEC, manifest, Dataset.open(store, DATASET_ID, cache_dir()), store)
    folder = layout.export(RUN, STEP, manifest.state_digest)
    common = {"run_id": RUN, "state_digest": manifest.state_digest, "step": STEP, "dataset_id": DATASET_ID}
    common["export_digest"] = export_digest
    result = {**common, "checkpoint": layout.checkpoint(RUN, STEP), "export": folder, "loss": 1.0}
    store.put(layout.result(RUN), json.dumps(result).encode())
    verdict = {**common, "key": "k-none", "word": "blessed", "reasons": [], "metrics": {}, "champion": None}
    verdict["settings"] = SPEC.evaluation.model_dump(mode="json")
    store.put(layout.verdict(RUN, "k-none"), json.dumps(verdict).encode())
    return {"before": before, "peak": peak()}


def register(store: Store) -> dict[str, int]:
    """Run the register step."""
    from holdfast.components.register import run

    registered = run(SPEC, RUN, store)
    temporary_bytes = sum(path.stat().st_size for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file())
    return {"version": registered.version, "peak": peak(), "temporary": temporary_bytes}


def load(store: Store) -> dict[str, int]:
    """Check the tensors of the export, one by one."""
    result = json.loads(store.get(layout.result(RUN)))
    weights = read_hugging_face(exported_files(store, result["export"], result["export_digest"]))
    same = all(digest(weights.tensor(name)) == digest(tensor(name)) for name in SHAPES)
    return {"same": int(same), "peak": peak()}


def peak() -> int:
    """The peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    work: Callable[[Store], dict[str, int]] = globals()[sys.argv[1]]
    print(json.dumps(work(open_store(sys.argv[2]))), flush=True)
