"""A run whose peak of memory is the generation of answers, and that peak."""

from itertools import chain

from benchmarks._living import Living
from holdfast.engines.torch.engine import TorchEngine
from holdfast.rollouts.generation import generate_lot, sampling_of
from holdfast.spec import Spec, parse_spec
from holdfast.spec.model import Model
from holdfast.spec.rollout import Grpo


def answering_spec(*overrides: str) -> Spec:
    """A lot of 16 prompts with 4 answers each, of half the context."""
    return parse_spec(
        """
        name: a
        store: s3://bucket/prefix
        data:
          kind: prompts
          document_masks: true
          sources: [{uri: x.jsonl}]
          tokenizer: {kind: file, path: x, end_of_text: x}
        model: {layers: 8, hidden: 96, heads: 6, kv_heads: 6, context: 64, init_from: x}
        training:
          {steps: 3, global_batch: 64, micro_batch: 1, grpo: {rewards: [exact], group: 4, lot: 16, answer_tokens: 32}}
        """,
        overrides,
    )


def peak_of_answers(engine: TorchEngine, model: Model, settings: Grpo, vocabulary: int) -> int:
    """The peak of bytes in live tensors, with the state, during a lot whose answers end with the context. A collective
    call."""
    state = [box.data for box in chain(engine.boxes(), engine.frozen())]
    for tensor in state:
        tensor.fill_(0.01)
    sampling = sampling_of(settings, settings.group, 0, vocabulary)  # no token ends an answer
    prompts = [[5] * (model.context - settings.answer_tokens)] * settings.lot
    with Living(state) as live, engine.generating() as decoder:
        generate_lot(decoder, prompts, range(settings.lot), sampling)
    return live.peak
