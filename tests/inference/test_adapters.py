"""Adapters of a mixture's experts, and rows of a mixture that do not depend on one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from holdfast.inference.adapters import read_adapter
from holdfast.inference.batch import AnswerBatch, AnswerJob, TokenSampling
from holdfast.inference.model import AnsweringModel
from holdfast.model.decoder import Decoder
from holdfast.model.files import Folder
from holdfast.spec.errors import DataError
from tests.inference.test_batch import PROMPTS, answer, submitted
from tests.inference.tiny import tiny_export
from tests.model.tiny_model import decoder, shape

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "experts": 4, "ffn": 48},
    "shared": {"family": "qwen2_moe", "experts": 4, "ffn": 48, "routing": {"shared": 1}},
    "gpt_oss": {"family": "gpt_oss", "experts": 4, "ffn": 48, "sliding_window": 4},
}
TARGETS = {"both": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "down": ["mlp.experts.down_proj"]}
PROMPT = [5, 6, 7, 8]


def peft_adapter(folder: Path, base: Path, rank: int, parameters: list[str]) -> list[int]:
    """An adapter with random weights, written by `peft`. Returns the tokens that it gives the prompt."""
    import peft  # takes seconds

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=rank, lora_alpha=64, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(str(folder))
    ids = torch.tensor([PROMPT])
    outputs = adapted.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    return outputs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("rank", "targets"), [(4, "both"), (3, "both"), (2, "down")])
def test_an_adapter_of_experts_answers_as_peft_does(
    tmp_path: Path, mixture: dict[str, Any], rank: int, targets: str
) -> None:
    """The other rows of the batch have no adapter."""
    folder = tiny_export(tmp_path / "base", template=False, context=64, **mixture)
    expected = peft_adapter(tmp_path / "adapter", folder, rank, TARGETS[targets])
    served = AnsweringModel.load(Folder(folder), torch.device("cpu"))
    adapter = read_adapter(Folder(tmp_path / "adapter"), served.decoder)
    batch = AnswerBatch(served.decoder, 3, adapters={"poet": adapter})
    try:
        plain = answer(submitted(batch, PROMPT)[1])[0]
        waiting = [submitted(batch, PROMPT, adapter=name)[1] for name in ("", "poet", "")]
        answers = [answer(events)[0] for events in waiting]
    finally:
        batch.close()
    assert answers == [plain, expected, plain]
    assert plain != expected


def test_a_row_of_a_mixture_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens of other rows chose an expert changes no bit."""
    built = decoder(shape(context=320, hidden=64, family="mixtral", experts=4, ffn=96)).eval()
    batch, seen = AnswerBatch(built, 3, waiting=2), list[Tensor]()
    next_token = AnswerJob.next_token

    def recorded(job: AnswerJob, logits: Tensor) -> int:
        if job.prompt == PROMPTS[0]:
            seen.append(logits.clone())
        return next_token(job, logits)

    monkeypatch.setattr(AnswerJob, "next_token", recorded)
    try:
        alone = answer(submitted(batch, PROMPTS[0], 40)[1])
        crowd = [submitted(batch, PROMPTS[2], 60, sampling=TokenSampling(1.3, seed=seed))[1] for seed in range(2)]
        shared = answer(submitted(batch, PROMPTS[0], 40)[1])
        for events in crowd:
            answer(events)
    finally:
        batch.close()
    assert shared == alone
    assert all(torch.equal(one, other) for one, other in zip(seen[:40], seen[40:], strict=True))


def test_an_adapter_of_other_experts_is_refused_with_what_fits(tmp_path: Path) -> None:
    folder = tiny_export(tmp_path / "base", template=False, **MIXTURES["mixtral"])
    peft_adapter(tmp_path / "adapter", folder, 4, TARGETS["down"])
    smaller: Decoder = decoder(shape(family="mixtral", experts=2, ffn=48))
    with pytest.raises(DataError, match=r"rank 4 and this model need \(8, 32\) and \(96, 8\) or \(8, 48\) and"):
        read_adapter(Folder(tmp_path / "adapter"), smaller)
    dense = decoder(shape())
    with pytest.raises(DataError, match="merge the adapter into its model, and serve that"):
        read_adapter(Folder(tmp_path / "adapter"), dense)
