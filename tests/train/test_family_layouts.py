"""The switches of the families in every layout that they concern: two ranks compute what one computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Steps, join_exactly, started, steps_of
from tests.train.test_mesh import require_close
from tests.train.tiny_run import VOCABULARY, tiny_assignment

FSDP, STAGES = "parallel.strategy=fsdp", ("parallel.pipeline=2", "training.micro_batch=1", "model.layers=4")
MODELS: dict[str, tuple[str, ...]] = {
    "olmo2": ("model.family=olmo2",),
    "olmo3": (
        "model.family=olmo3", "model.sliding_window=5", "model.layers=4",
        "model.rope_scaling={kind: yarn, factor: 4, original_context: 8}",
    ),
    "smollm3": ("model.family=smollm3", "model.layers=4"),
    "phi3": ("model.family=phi3", "model.rotary_fraction=0.5"),
    "gemma3_text": (
        "model.family=gemma3_text", "model.sliding_window=5", "model.layers=4", "model.rope_local_theta=100",
        "model.layer_pattern=[sliding, full]", "model.query_scalar=20",
    ),
    "gpt_oss": (
        "model.family=gpt_oss", "model.sliding_window=5", "model.experts=4", "model.ffn=24", "model.layers=4",
        "model.routing.coefficient=0.1",
    ),
    "glm4_moe": (
        "model.family=glm4_moe", "model.experts=4", "model.ffn=24", "model.layers=4", "model.dense_layers=1",
        "model.dense_ffn=40", "model.attention_bias=true", "model.query_key_norm=true", "model.rotary_fraction=0.5",
        "model.routing={groups: 2, top_groups: 1, top_k: 2, shared: 1, scale: 2.5, balance: bias, bias_step: 0.01}",
    ),
    "deepseek_v3": (
        "model.family=deepseek_v3", "model.experts=4", "model.ffn=24", "model.layers=4", "model.dense_layers=1",
        "model.head_dim=12", "model.kv_heads=4", "model.routing={shared: 1}",
        "model.latent={query: 10, key_value: 14, rope: 8, value: 6}",
    ),
}  # fmt: skip
TENSOR, CONTEXT, EXPERT = ("parallel.tensor=2",), ("parallel.context=2", FSDP), ("parallel.expert=2", FSDP)
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "olmo2": (TENSOR, (FSDP,)),
    "olmo3": (CONTEXT, STAGES),
    "smollm3": (STAGES,),
    "phi3": (TENSOR,),
    "gemma3_text": (TENSOR, STAGES, (*CONTEXT, "training.activation_checkpointing=full")),
    "gpt_oss": (TENSOR, STAGES, CONTEXT, EXPERT),
    "glm4_moe": (TENSOR, STAGES, EXPERT),
    "deepseek_v3": (TENSOR, STAGES, CONTEXT),
}
ELASTIC = tuple((*MODELS[name], "training.determinism=elastic", "training.micro_batch=2") for name in (
    "gemma3_text", "gpt_oss",
))  # fmt: skip
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCABULARY, (8, 17), generator=generator) for _ in range(3)]


def _compute(rank: int, size: int, folder: Path, cases: list[tuple[str, ...]]) -> list[Steps]:
    join_exactly(folder, rank, size, always=True)
    results = []
    for fields in cases:
        spec = tiny_assignment(f"parallel.processes={size}", *fields)
        results.append(steps_of(started(spec), spec, rank, size, batches(), 0.01))
    return results


@pytest.mark.drill
def test_two_ranks_train_each_family_as_one_does_in_every_layout(tmp_path: Path) -> None:
    layouts = [(*MODELS[name], *layout) for name, layout in CASES] + list(ELASTIC)
    ranks = in_ranks(2, _compute, tmp_path / "two", layouts)
    (single,) = in_ranks(1, _compute, tmp_path / "one", [*MODELS.values(), *ELASTIC])
    alone = dict(zip(MODELS, single, strict=False))
    for index, (name, layout) in enumerate(CASES):
        curve = max((results[index][0] for results in ranks), key=lambda curve: curve[0][0])  # not of a first stage
        expected = alone[name][0]
        (losses, norms), (losses_alone, norms_alone) = (np.array(steps, np.float32).T for steps in (curve, expected))
        require_close(losses, losses_alone)
        require_close(norms[:1], norms_alone[:1])
        assert expected[-1][0] != expected[0][0], (name, layout)
    for one, two in zip(single[len(MODELS) :], ranks[0][len(CASES) :], strict=True):
        assert one[0] == two[0], "elastic: the same bits at another number of ranks"
