"""Memory of a rank while it generates answers (`data.kind: prompts`), in bytes. `tests/planning` and
`tests/rollouts/test_whole_model.py` compare it with torch's counts."""

from dataclasses import dataclass
from typing import Self

from holdfast.planning.shape import Architecture
from holdfast.spec.training import Training

SCORES = 3  # tensors of attention's scores that exist together: before and after the mask, and their shares
LAYER_WIDTHS = 3  # tensors of a feed-forward layer that exist together: gate, up and their product
STREAM = (3, 2)  # tensors of the hidden width that exist with them: of the residual stream, and inputs of products
LOGITS = 12.0  # bytes of a logit: of two tokens, and its share, in fp32


@dataclass(frozen=True)
class AnswerLot:
    """The answers that a rank generates together: a lot."""

    prompts: int
    rows: int
    tokens: int  # of an answer at most
    generated: bool = True  # by the rank, and not by a server

    @classmethod
    def of(cls, training: Training) -> Self:
        """Those of a spec."""
        grpo = training.grpo
        prompts = min(grpo.lot, max(1, training.global_batch // grpo.group))
        return cls(prompts, prompts * grpo.group, grpo.answer_tokens, grpo.server is None)


def answering(answers: AnswerLot, shape: Architecture, size: float, copied: float, buffers: float) -> dict[str, float]:
    """The terms of a rank that generates a lot of answers, which end with the context. `size` is that of a result of a
    product, `copied` that of the copy of the model, and `buffers` that of the weights in 16 bits, or packed. Rotation
    makes keys fp32."""
    if not answers.generated:
        return {"whole model": copied}
    positions, tokens = answers.rows * shape.context, answers.prompts * (shape.context - answers.tokens)
    keys = (tokens + answers.rows * answers.tokens) * shape.key_width  # each prompt once, and all answers
    cast = keys * size if size < 4 else 0.0  # keys of a layer
    hidden = shape.hidden * (STREAM[0] * 4.0 + STREAM[1] * size)
    working = {
        "prompts": tokens * (LAYER_WIDTHS * shape.ffn * shape.met * size + hidden),
        "scores": SCORES * 4.0 * shape.heads * positions + cast,
        "logits": answers.rows * shape.vocabulary * LOGITS,
    }
    return {
        "whole model": copied,
        "caches of answers": keys * (4.0 + size) * shape.layers,
        "buffers": buffers,
        "working set": max(working.values()),
    }
