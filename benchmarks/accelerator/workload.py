"""What every measurement trains: models of three sizes, their spec, engine, weights and batches."""

from __future__ import annotations

import json
from typing import Any

import torch

END_OF_TEXT = 0
DOCUMENTS = 20  # of a row with document masks


def shapes(size: str) -> tuple[dict[str, int], int, int, int]:
    """Model, vocabulary, micro-batch and global batch of a size."""
    if size == "tiny":
        return {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "context": 64}, 256, 2, 4
    if size == "small":
        return {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "context": 512}, 4096, 4, 8
    return {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5504, "context": 2048}, 32768, 4, 16


def spec_for(size: str, accelerator: str, **training: object) -> Any:
    """The spec of a size; `masks` keeps attention inside documents."""
    from holdfast.spec import parse_spec

    model, _, micro, global_batch = shapes(size)
    masks = bool(training.pop("masks", False))
    document = {
        "name": "accelerator",
        "data": {"sources": [{"uri": "none"}], "document_masks": masks},
        "model": model,
        "training": {"steps": 100, "global_batch": global_batch, "micro_batch": micro, **training},
        "parallel": {"processes": 1},
        "cluster": {"accelerator": accelerator},
    }
    return parse_spec(json.dumps(document), [])


def engine_for(spec: Any, vocabulary: int) -> Any:
    """The engine of a spec, with its determinism set."""
    from holdfast.engines.assignment import Assignment
    from holdfast.engines.interface import build_engine
    from holdfast.rank.randomness import make_deterministic

    make_deterministic(spec.training.determinism, torch.get_num_threads())
    return build_engine(Assignment.of(spec, "accelerator", "none"), vocabulary, END_OF_TEXT)


def fill(state: Any) -> None:
    """Random matrices and norms of one, made on the device, in the weights of an engine or a module."""
    torch.manual_seed(0)
    weights = state.parameters() if isinstance(state, torch.nn.Module) else _weights(state)
    with torch.no_grad():
        for weight in weights:
            weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)


def _weights(engine: Any) -> list[torch.Tensor]:
    """The weights among an engine's boxes, which are views of its state."""
    from holdfast.engines.weights import MOMENTS

    return [box.data for box in engine.boxes() if not box.name.startswith(tuple(MOMENTS.values()))]


def rows_for(step: int, count: int, context: int, vocabulary: int, documents: int = 1) -> torch.Tensor:
    """The batch of a step, a pure function of the step. Each row has so many documents of about equal length."""
    noise = torch.Generator().manual_seed(step)
    rows = torch.randint(1, vocabulary, (count, context + 1), generator=noise)
    if documents > 1:
        rows[:, context // documents :: context // documents] = END_OF_TEXT
    return rows


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
