"""Small states, and functions that save and load them."""

from contextlib import suppress
from dataclasses import fields
from itertools import count
from typing import Any

import torch

from holdfast.checkpoint import (
    Attempt,
    Checkpoint,
    Checkpointer,
    Retention,
    SaveOptions,
    TensorBox,
    load_newest,
    open_checkpoint,
)
from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError
from holdfast.store import Store, layout, open_store

RUN = "run"
DESCRIBE: dict[str, Any] = {"dataset_id": "d", "layout": {"strategy": "ddp"}, "random": {"seed": 0}}


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that a checkpoint can hold, at `step`. `frozen` never changes."""
    torch.manual_seed(step)
    return {
        "matrix": torch.randn(7, 5),
        "half": torch.randn(6, 3).bfloat16(),
        "double": torch.randn(4, dtype=torch.float64),
        "count": torch.tensor(step, dtype=torch.int64),
        "scalar": torch.randn(()),
        "bytes": torch.randint(0, 256, (9,), dtype=torch.uint8),
        "empty": torch.empty(0, 4),
        "flat": torch.empty(3, 0),
        "frozen": torch.arange(10, dtype=torch.float32),
    }


def whole(tensors: dict[str, torch.Tensor]) -> list[TensorBox]:
    """Every tensor as one box."""
    return [TensorBox.whole(name, tensor) for name, tensor in tensors.items()]


def shards(tensors: dict[str, torch.Tensor], rank: int, size: int) -> list[TensorBox]:
    """The rows of each tensor that FSDP gives to `rank`: equal chunks, the last ones short or empty. The last rank has
    the tensors without rows.
    """
    boxes = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            boxes += [TensorBox.whole(name, tensor)] if rank == size - 1 else []
            continue
        rows = -(-tensor.shape[0] // size)
        low = min(rank * rows, tensor.shape[0])
        part = tensor[low : low + rows]
        if tensor.numel() or rank == 0:
            boxes.append(TensorBox(name, tuple(tensor.shape), (low,) + (0,) * (tensor.dim() - 1), part))
    return boxes


def blank(boxes: list[TensorBox]) -> list[TensorBox]:
    """The same boxes with zeroed content."""
    return [TensorBox(box.name, box.global_shape, box.offset, torch.full_like(box.data, 77)) for box in boxes]


def same(boxes: list[TensorBox], others: list[TensorBox]) -> bool:
    """Whether two lists of boxes hold the same bits."""
    return [_content(box) for box in boxes] == [_content(box) for box in others]


def _content(box: TensorBox) -> tuple[Any, ...]:
    raw = box.data.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return box.name, box.offset, tuple(box.data.shape), box.data.dtype, raw


def checkpointer(
    store: Store,
    number: int = 1,
    keep_last: int = 100,
    keep_every: int | None = None,
    keep_days: float | None = None,
    **more: Any,
) -> Checkpointer:
    """A checkpointer of attempt `number`."""
    retention = Retention(keep_last, keep_every, keep_days)
    options = SaveOptions(**{field.name: more.pop(field.name) for field in fields(SaveOptions) if field.name in more})
    return Checkpointer(store, Attempt(RUN, number), retention, describe=DESCRIBE, options=options, **more)


def save(writer: Checkpointer, step: int, boxes: list[TensorBox] | None = None) -> None:
    """Save a step and wait for its commit."""
    writer.save(step, whole(state(step)) if boxes is None else boxes, {"optimizer.step": step})
    writer.wait()


def load(store: Store) -> tuple[Checkpoint | None, list[TensorBox]]:
    """Load the newest checkpoint as whole tensors. Retries until one rank is sure of damage."""
    boxes = blank(whole(state(0)))
    for attempt in count(1):
        with suppress(BadReaderError):
            return load_newest(store, RUN, boxes, Gang(), attempt), boxes
    raise AssertionError


def pack_of(store: Store, step: int, piece: int = 0) -> tuple[str, int]:
    """The key of the pack with a piece of `matrix` of a checkpoint, and the start of the piece in the pack."""
    place = open_checkpoint(store, RUN, step).pieces("matrix")[piece].place
    return layout.pack(RUN, str(place.pack)), place.start


def opened(url: str) -> Store:
    """Open a store in another process."""
    return open_store(url)


def names(store: Store, folder: str) -> list[str]:
    """The names of the objects in a folder of the run."""
    prefix = f"runs/{RUN}/{folder}/"
    return [info.key.removeprefix(prefix) for info in store.list(prefix)]
