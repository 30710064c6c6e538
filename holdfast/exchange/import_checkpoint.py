"""Import: a state from another system becomes the first checkpoint of a run.

The run is named after the imported state: its salt is a digest of the state and its step. So a repeated import gives
the same run, and no run that computed its state is mistaken for it. Each part becomes the share of a separate writer,
as large as memory allows, so a state of any size passes through one process. The commit checks that the parts make up
every tensor exactly once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from holdfast.checkpoint import TensorBox, claim_attempt, digest_of, open_checkpoint, scalars_digest
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.retention import checkpoint_times
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.exchange.torch_file import StoredTensor, file_inside, read_tensors
from holdfast.model.initialise import parameter_shapes, trained
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, read_file_bounded

WRITER_BYTES = 256 * 2**20  # of the state in memory at a time
BOX_BYTES = WRITER_BYTES // 4
MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")
EMBEDDING = "model.embed_tokens.weight"


class Source(Protocol):
    """A state of another system."""

    @property
    def where(self) -> str:
        """Its location, for people."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor by its canonical name, or None without such a tensor. Raises DataError."""

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """A tensor in boxes of bounded size, of any floating-point dtype, without shared elements. Raises DataError."""


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The result of an import."""

    run_id: str
    salt: str  # for `holdfast run SPEC --salt`
    step: int
    state_digest: str
    bytes: int
    moments: bool  # whether the optimizer's state was imported; else it begins at zero
    again: bool = False  # it already existed


def import_checkpoint(
    spec: Spec,
    dataset_id: str,
    source: Source,
    store: Store,
    *,
    step: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ImportedCheckpoint:
    """Make the state of `source` the checkpoint at `step` of a run of `spec`. The source is read twice: the first
    time to name the run. Raises DataError if the source does not fit the spec's model or cannot be read."""
    if spec.model.init_from is not None:
        raise DataError(
            f"model.init_from: {spec.model.init_from} already says where the weights are from; leave it out"
        )
    if field := _own_state(spec):
        raise DataError(f"{field} needs state that {source.where} does not have; leave it out")
    if not 0 <= step < spec.training.steps:
        raise DataError(f"step {step} is not below training.steps = {spec.training.steps}: nothing is left to train")
    shapes, moments = _shapes(spec, source)
    names = [*shapes, *(prefix + name for prefix in MOMENTS for name in shapes if trained(name))]
    all_shapes = {name: shapes[name.removeprefix(MOMENTS[0]).removeprefix(MOMENTS[1])] for name in names}
    total, done = 2 * 4 * sum(prod(shape) for shape in all_shapes.values()), 0

    def boxes() -> Iterator[TensorBox]:
        nonlocal done
        for name, shape in all_shapes.items():
            for box in source.boxes(name) if moments or name in shapes else _zeros(name, shape):
                yield TensorBox(name, shape, box.offset, box.data.to(torch.float32).contiguous())
                done += box.data.numel() * 4
                progress(done, total)

    scalars = {"optimizer.step": step}
    digest = str(sum((digest_of([box]) for box in boxes()), StateDigest()) + scalars_digest(scalars))
    salt = f"imported-{step}-{digest[:16]}"
    identity = run_id(spec, dataset_id, salt)
    imported = ImportedCheckpoint(identity, salt, step, digest, total // 2, moments)
    if steps := list(checkpoint_times(store, identity)):
        if steps == [step] and open_checkpoint(store, identity, step).manifest.state_digest != digest:
            raise DataError(f"run {identity} has another state at step {step}; please report it")
        return ImportedCheckpoint(identity, salt, step, digest, total // 2, moments, again=True)
    attempt = claim_attempt(store, identity)
    writers, written_digest = 0, scalars_digest(scalars)
    for group in _groups(boxes()):
        written_digest += ShardWriter(store, attempt, writers).write(step, group).header.totals.digest
        writers += 1
    if str(written_digest) != digest:
        raise DataError(f"{source.where} changed while it was read; import it again once no process writes it")
    committer = Committer(store, attempt, writers)
    for writer in reversed(range(writers)):  # a node waits for its children, which later writers lead
        committer.lead(step, writer)
    fields = {
        "dataset_id": dataset_id,
        "layout": {"imported from": source.where},
        "random": {"scheme": "keyed by step", "seed": spec.training.seed},
    }
    committer.commit(step, fields, scalars)
    return imported


def _own_state(spec: Spec) -> str:
    """The field of a spec whose run has other state than weights and the moments of all. Empty if none does."""
    if spec.training.ema.decay is not None:
        return "training.ema.decay"
    if spec.training.optimizer.kind == "muon":
        return "training.optimizer.kind: muon"
    frozen = any(group.frozen for group in spec.training.optimizer.groups)
    return "training.optimizer.groups[].frozen" if frozen else ""


def _shapes(spec: Spec, source: Source) -> tuple[Mapping[str, tuple[int, ...]], bool]:
    """The weights of the model with their shapes, all of which the source has, and whether it also has the moments.
    Raises DataError if the source does not fit the spec's model."""
    embedding = source.shape(EMBEDDING)
    if embedding is None:
        raise DataError(f"{source.where} has no {EMBEDDING}: it holds no model that Holdfast knows")
    shapes = parameter_shapes(spec.model, embedding[0])
    for name, shape in shapes.items():
        if (shape_found := source.shape(name)) != shape:
            actual = "no such tensor" if shape_found is None else f"the shape {list(shape_found)}"
            raise DataError(
                f"{source.where}: {name} has {actual}, the model of the spec needs {list(shape)}; fix `model`"
            )
    of_moments = {prefix + name: shape for prefix in MOMENTS for name, shape in shapes.items() if trained(name)}
    moment_shapes = [source.shape(name) for name in of_moments]
    if all(shape_found is None for shape_found in moment_shapes):
        return shapes, False
    if moment_shapes != [*of_moments.values()]:
        name = next(
            name
            for (name, shape), shape_found in zip(of_moments.items(), moment_shapes, strict=True)
            if shape_found != shape
        )
        raise DataError(f"{source.where}: {name} is missing or of another shape, and other moments exist")
    return shapes, True


def _zeros(name: str, shape: tuple[int, ...]) -> Iterator[TensorBox]:
    """Moments that begin at zero, in parts."""
    rows = max(1, WRITER_BYTES // 4 // max(1, 4 * prod(shape[1:])))
    for first in range(0, shape[0], rows):
        part = torch.zeros((min(rows, shape[0] - first), *shape[1:]))
        yield TensorBox(name, shape, (first, *(0 for _ in shape[1:])), part)


def _groups(boxes: Iterator[TensorBox]) -> Iterator[list[TensorBox]]:
    group: list[TensorBox] = []
    size = 0
    for box in boxes:
        group.append(box)
        size += box.data.nbytes
        if size >= WRITER_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


# DeepSpeed's universal checkpoints, as `ds_to_universal.py` writes them, as a source.
#
# Each parameter has a folder `zero/<name>/` with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`. They are read without
# torch's loader (`torch_file`). So nothing is unpickled, and only the current rows of a tensor are in memory.

LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL_FILES = {"": "fp32.pt", MOMENTS[0]: "exp_avg.pt", MOMENTS[1]: "exp_avg_sq.pt"}


class UniversalCheckpoint:
    """See Source. It finds parameters by their canonical names, with or without the prefix `module.`."""

    def __init__(self, folder: Path) -> None:
        """Open the folder of one step, or a folder whose `latest_universal` names it. Raises MissingError."""
        latest = folder / LATEST_UNIVERSAL
        if latest.is_file() and not (folder / "zero").is_dir():
            folder_name = read_file_bounded(latest, 4096).decode("utf-8", "replace").strip()
            folder = file_inside(folder, folder_name)
        if not (folder / "zero").is_dir():
            raise MissingError(
                f"{folder}: has no folder `zero`; convert a DeepSpeed checkpoint first: "
                "python -m deepspeed.checkpoint.ds_to_universal --input_folder … --output_folder …"
            )
        self.where, self._zero = str(folder), folder / "zero"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See Source."""
        tensor = self._tensor(name)
        return None if tensor is None else tuple(tensor.shape)

    def boxes(self, name: str) -> Iterator[TensorBox]:
        """See Source."""
        tensor = self._tensor(name)
        assert tensor is not None
        for first, data in tensor.rows(BOX_BYTES):
            yield TensorBox(name, tensor.shape, (first, *(0 for _ in tensor.shape[1:])) if tensor.shape else (), data)

    def _tensor(self, name: str) -> StoredTensor | None:
        """A tensor in its file, or None."""
        moment = next((prefix for prefix in MOMENTS if name.startswith(prefix)), "")
        weight = name.removeprefix(moment)
        for parameter in (weight, f"module.{weight}"):
            folder = self._zero / parameter
            if (folder / UNIVERSAL_FILES[moment]).is_file():
                break
        else:
            return None
        path = file_inside(file_inside(self._zero, parameter), UNIVERSAL_FILES[moment])
        read = read_tensors(path)
        tensor = read.get("param") if isinstance(read, dict) else read
        if tensor is None:
            raise DataError(f"{path}: holds no tensor of numbers")
        return tensor
