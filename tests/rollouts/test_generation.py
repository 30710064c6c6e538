"""Generation in lots: the distribution of tokens, padding, windows, and what the bits depend on."""

from typing import Any

import pytest
import torch

from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.model.layers import LayerCache
from holdfast.model.lora import add_adapters
from holdfast.rollouts.caches import LotCache, LotPositions, read_tokens
from holdfast.rollouts.generation import BLOCK, LENGTH, STOP, Sampling, generate_lot, sample_tokens, uniforms
from holdfast.rollouts.packed import PackedDecoder, is_packable
from holdfast.spec.model import Model
from holdfast.spec.training import Lora

VOCABULARY, END = 40, 3
SHAPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "windows": {"family": "gemma3_text", "sliding_window": 4, "layer_pattern": ("sliding", "full")},
    "sinks": {"family": "gpt_oss", "sliding_window": 4},
    "latents": {
        "family": "deepseek_v3", "kv_heads": 4, "experts": 4, "head_dim": 12, "dense_layers": 2, "dense_ffn": 56,
        "latent": {"query": 10, "key_value": 14, "rope": 8, "value": 6},
    },
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]


def decoder_of(**fields: Any) -> Decoder:
    shape = Model(**{"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "context": 24, **fields})
    decoder = Decoder.empty(shape, VOCABULARY)
    initialise(decoder, seed=1)
    return decoder.eval()


def sampling(**fields: Any) -> Sampling:
    values = {"answers": 3, "most_tokens": 8, "temperature": 0.7, "seed": 1, "end_of_text": END} | fields
    return Sampling(**values)


@pytest.mark.parametrize("name", SHAPES)
def test_a_lot_samples_from_the_distribution_of_the_whole_sequence(name: str) -> None:
    """Each token is the one that the same number u gives with the logits of an ordinary forward pass in fp64."""
    decoder, how = decoder_of(**SHAPES[name]).double(), sampling()
    lot = generate_lot(decoder, PROMPTS, [4, 5, 9], how)
    for prompt, place, answers in zip(PROMPTS, [4, 5, 9], lot, strict=True):
        assert len({tuple(answer.tokens) for answer in answers}) == 3
        for number, answer in enumerate(answers):
            u = uniforms(how.seed, place, number, how.most_tokens)
            with torch.no_grad():
                logits: Any = decoder(torch.tensor([prompt + answer.tokens]))
            expected = logits[0, len(prompt) - 1 : -1]
            tokens, entropy = sample_tokens(expected, torch.tensor(u[: len(answer.tokens)]).double(), how.temperature)
            assert tokens.tolist() == answer.tokens
            assert answer.entropy == pytest.approx(float(entropy.mean()), rel=1e-9)


def test_a_lot_is_a_pure_function_of_its_inputs() -> None:
    decoder = decoder_of()
    once, again = (generate_lot(decoder, PROMPTS, [0, 1, 2], sampling()) for _ in range(2))
    assert once == again
    assert generate_lot(decoder, PROMPTS, [0, 1, 3], sampling())[2] != once[2]
    assert generate_lot(decoder, PROMPTS, [0, 1, 2], sampling(seed=2)) != once


@pytest.mark.parametrize("name", SHAPES)
def test_answers_to_a_prompt_share_its_cache_and_are_those_of_a_lot_of_it_alone(name: str) -> None:
    """The shorter prompts are padded in the lot, and no layer may see the padding."""
    decoder, how = decoder_of(**SHAPES[name]).double(), sampling(end_of_text=-1)
    whole = generate_lot(decoder, PROMPTS, [4, 5, 9], how)
    for prompt, place, answers in zip(PROMPTS, [4, 5, 9], whole, strict=True):
        (alone,) = generate_lot(decoder, [prompt], [place], how)
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in answers]
        for one, other in zip(alone, answers, strict=True):
            assert one.entropy == pytest.approx(other.entropy, rel=1e-9)


def test_a_cache_keeps_the_keys_of_a_prompt_once() -> None:
    decoder, how = decoder_of(), sampling()
    positions = LotPositions(torch.tensor([3]), how.answers, how.most_tokens)
    caches: list[LayerCache] = [LotCache(positions) for _ in range(2)]
    with torch.no_grad():
        decoder.hidden(torch.tensor([PROMPTS[0]]), cache=caches)
        logits_BV = read_tokens(decoder, caches, torch.tensor([8, 8, 9]), positions.next_positions)
        expected: Any = decoder(torch.tensor([[*PROMPTS[0], token] for token in (8, 8, 9)]))
    torch.testing.assert_close(logits_BV, expected[:, -1])
    assert torch.equal(logits_BV[0], logits_BV[1])
    kept = caches[0].k_BGSK
    assert kept is not None
    assert kept.shape == (1, 2, 3, 8)


def test_an_answer_ends_with_its_end_token_or_at_the_limit() -> None:
    decoder = decoder_of()
    answers = [
        answer for answers in generate_lot(decoder, PROMPTS * 4, range(12), sampling(answers=8)) for answer in answers
    ]
    stopped = [answer for answer in answers if answer.ending == STOP]
    assert stopped
    assert all(answer.tokens.index(END) == len(answer.tokens) - 1 for answer in stopped)
    assert all(END not in answer.tokens and len(answer.tokens) == 8 for answer in answers if answer.ending == LENGTH)


def test_tokens_have_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    u = (torch.arange(1000).double() + 0.5) / 1000
    tokens, entropy = sample_tokens(logits.expand(1000, -1), u, 1.0)
    shares = torch.bincount(tokens, minlength=4) / 1000
    torch.testing.assert_close(shares, logits.softmax(0), atol=2e-3, rtol=0)
    assert int(shares[2]) == 0
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert float(entropy[0]) == pytest.approx(float(expected))
    assert sample_tokens(logits[None], torch.tensor([1 - 2.0**-53]).double(), 1.0)[0].tolist() == [3]


@pytest.mark.parametrize("wide", [True, False], ids=["fp64", "fp32"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_token_is_in_the_block_and_at_the_place_whose_sums_contain_its_number(temperature: float, wide: bool) -> None:
    """Bit for bit, as runs have recorded answers of this definition, and entropies that are the logarithm of all less
    the mean."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 151, generator=generator) * torch.tensor([1.0, 8.0, 300.0, 900.0]).repeat(16)[:, None]
    logits[::3, ::5] = -torch.inf
    logits = logits.double() if wide else logits
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    u[0], u[1], u[2] = 0, 1 - 2.0**-53, 0.5
    scaled = logits / temperature
    scaled -= scaled.amax(-1, keepdim=True)
    parts = scaled.exp()
    blocks = torch.nn.functional.pad(parts, (0, -151 % BLOCK)).view(64, -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    whole = sums[:, -1]
    expected = []
    for row, goal in enumerate(u * whole):
        block = int(((sums[row] <= goal) & (sums[row] < whole[row])).sum())
        within = blocks[row, block].double().cumsum(-1)
        rest = goal - (sums[row, block - 1] if block else 0)
        expected.append(block * BLOCK + int(((within <= rest) & (within < within[-1])).sum()))
    tokens, entropy = sample_tokens(logits, u, temperature)
    assert tokens.tolist() == expected
    mean = (torch.where(parts > 0, scaled, 0.0) * parts).sum(-1)
    assert torch.equal(entropy, (whole.log() - mean / whole).clamp(min=0))
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature, validate_args=False)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=0, atol=1e-12 if wide else 1e-5)
    assert bool((distribution.probs.gather(1, tokens[:, None]) > 0).all())
    assert sample_tokens(torch.full((1, 9), torch.nan), u[:1], temperature)[0].tolist() == [0]


YARN = {"kind": "yarn", "factor": 4.0, "original_context": 8}
LONGROPE = {
    "kind": "longrope", "factor": 3.0, "original_context": 8, "short_factors": [1.0, 1.5, 2.0, 2.5],
    "long_factors": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
PACKABLE: dict[str, dict[str, Any]] = {
    "whole": {"tie_embeddings": False},
    "scaled rotation": {"rope_scaling": YARN},
    "windows of mistral": {"family": "mistral", "sliding_window": 4},
    "biases": {"family": "qwen2"},
    "norms of heads": {"family": "qwen3", "head_dim": 12},
    "phi3": {"family": "phi3", "sliding_window": 4},
    "phi3, longrope": {"family": "phi3", "rope_scaling": LONGROPE},
    "smollm3, all layers rotated": {"family": "smollm3", "layer_pattern": ("full",)},
}


@pytest.mark.parametrize("shape", PACKABLE)
def test_packed_matrices_are_the_same_function(shape: str) -> None:
    """Random norms and biases, so that none of them may be left out."""
    decoder, how = decoder_of(**PACKABLE[shape]).double(), sampling(end_of_text=-1)
    generator = torch.Generator().manual_seed(2)
    for weight in decoder.parameters():
        if weight.dim() == 1:
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2 + 1
    assert is_packable(decoder)
    positions = LotPositions(torch.tensor([len(prompt) for prompt in PROMPTS]), how.answers, how.most_tokens)
    caches = [LotCache(positions) for _ in range(2)]
    packed = PackedDecoder(decoder)
    tokens = torch.randint(1, VOCABULARY, (len(PROMPTS), how.answers, how.most_tokens), generator=generator)
    with torch.no_grad():
        decoder.hidden(torch.tensor([[*prompt, *[0] * (6 - len(prompt))] for prompt in PROMPTS]), cache=list(caches))
        for at in range(how.most_tokens):
            logits_BV = packed.read_tokens(caches, tokens[:, :, at].flatten(), positions.next_positions)
            positions.advance()
            for row, own in enumerate(tokens.flatten(0, 1)[:, : at + 1].tolist()):
                whole: Any = decoder(torch.tensor([PROMPTS[row // how.answers] + own]))
                torch.testing.assert_close(logits_BV[row], whole[0, -1], rtol=1e-5, atol=1e-6)


def test_packing_leaves_the_weights_alone_whatever_their_layout_in_memory() -> None:
    """The transposed view of a matrix that is stored by columns is contiguous."""
    decoder = decoder_of()
    for weight in decoder.parameters():
        weight.data = torch.full_like(weight, 2) if weight.dim() == 1 else weight.data.T.contiguous().T
    before = {name: weight.clone() for name, weight in decoder.state_dict().items()}
    with torch.no_grad():
        packed = PackedDecoder(decoder)
    assert all(torch.equal(weight, before[name]) for name, weight in decoder.state_dict().items())
    storage = packed._layers[0]._o_FD.untyped_storage().data_ptr()
    assert storage not in {weight.untyped_storage().data_ptr() for weight in decoder.parameters()}


def test_other_layers_and_precisions_are_not_packed() -> None:
    families: list[dict[str, Any]] = [SHAPES[name] for name in ("windows", "sinks", "latents")]
    families += [{"family": "phi3", "rotary_fraction": 0.5}, {"family": "smollm3", "layers": 4}, {"family": "olmo2"}]
    assert not any(is_packable(decoder_of(**fields)) for fields in families)
    assert not is_packable(decoder_of().bfloat16())
    assert not is_packable(Decoder.empty(Model(layers=1, hidden=1024, heads=8, context=24), VOCABULARY))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_packable(decoder_of())
    adapted = decoder_of()
    add_adapters(adapted, Lora(rank=2))
    assert not is_packable(adapted)
