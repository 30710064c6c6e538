"""The decoder: its names, masks and buffers, and the determinism that resuming needs."""

import hashlib

import pytest
import torch

from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import Decoder, document_ids
from holdfast.model.initialise import initialise
from holdfast.model.layers import LayerCache
from tests.model.tiny_model import decoder, shape

TOKENS = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))


def documents_of(tokens: torch.Tensor, end: int = 0) -> Segments:
    return Segments.of_documents(document_ids(tokens, end))


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("tied", [True, False])
def test_the_state_has_the_hugging_face_names_and_nothing_else(tied: bool) -> None:
    names = set(decoder(shape(tie_embeddings=tied)).state_dict())
    layer = "model.layers.1."
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        f"{layer}self_attn.q_proj.weight",
        f"{layer}self_attn.o_proj.weight",
        f"{layer}mlp.gate_proj.weight",
        f"{layer}mlp.down_proj.weight",
    } <= names
    assert ("lm_head.weight" in names) != tied
    assert len(names) == 2 + 2 * 9 + (not tied)


def test_a_decoder_materialised_from_meta_is_the_one_built_in_place() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    from_meta = Decoder.empty(shape(), 300)
    assert torch.equal(torch.get_rng_state(), before), "building a model must not draw from the global generator"
    in_place = Decoder(shape(), 300)
    initialise(from_meta, 0)
    initialise(in_place, 0)
    assert torch.equal(from_meta(TOKENS), in_place(TOKENS))


def test_a_later_token_changes_nothing_before_it() -> None:
    built = decoder(shape(kv_heads=2))
    changed = TOKENS.clone()
    changed[:, 20:] = 7
    assert torch.equal(built(TOKENS)[:, :20], built(changed)[:, :20])
    assert not torch.equal(built(TOKENS)[:, 20:], built(changed)[:, 20:])


def test_documents_are_numbered_and_the_end_of_text_belongs_to_the_one_it_ends() -> None:
    tokens = torch.tensor([[5, 6, 0, 7, 0, 0, 8], [0, 1, 2, 3, 4, 5, 6]])
    assert document_ids(tokens, 0).tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_document_masks_hide_other_documents_and_only_them() -> None:
    built = decoder(shape())
    tokens = TOKENS.clone().clamp(min=1)
    tokens[:, 11] = 0
    changed = tokens.clone()
    changed[:, :11] = 9
    masked, masked_changed = (built(t, segments=documents_of(t)) for t in (tokens, changed))
    assert torch.equal(masked[:, 12:], masked_changed[:, 12:])
    assert not torch.equal(masked[:, 11], masked_changed[:, 11]), "the end-of-text token sees its own document"
    one_document = torch.zeros_like(tokens)
    assert (built(tokens, segments=Segments.of_documents(one_document)) - built(tokens)).abs().max() < 1e-5, (
        "one document is plain causal"
    )


def test_a_document_scores_the_same_at_any_position_of_the_sequence() -> None:
    built = decoder(shape())
    tokens = TOKENS.clone().clamp(min=1)
    tokens[:, 11] = 0
    alone = built(tokens[:, 12:])
    packed = built(tokens, segments=documents_of(tokens))[:, 12:]
    assert (alone - packed).abs().max() < 1e-4, "rotary attention sees only differences of positions"


def test_the_loss_is_the_mean_cross_entropy_in_fp32_also_for_bf16_weights() -> None:
    built = decoder(shape())
    losses = built(TOKENS, TOKENS, reduction="none")
    assert losses.shape == TOKENS.shape
    expected = -built(TOKENS).log_softmax(-1).gather(-1, TOKENS[..., None]).squeeze(-1)
    assert (losses - expected).abs().max() < 1e-5
    assert (built(TOKENS, TOKENS) - expected.mean()).abs() < 1e-5
    assert built.to(torch.bfloat16)(TOKENS, TOKENS).dtype == torch.float32


@pytest.mark.parametrize("masks", [False, True])
def test_forward_and_backward_give_the_same_bits_twice_under_deterministic_algorithms(masks: bool) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        digests = set()
        for _ in range(3):
            built = decoder(shape(kv_heads=2))
            loss = built(TOKENS, TOKENS.roll(-1, 1), documents_of(TOKENS, 3) if masks else None)
            gradients = torch.autograd.grad(loss, list(built.parameters()))
            digests.add(bits(torch.cat([gradient.flatten() for gradient in gradients] + [loss[None]])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(digests) == 1


def test_a_cache_gives_the_logits_of_the_whole_sequence() -> None:
    built = decoder(shape(kv_heads=2))
    whole = built(TOKENS)
    cache = [LayerCache() for _ in range(2)]
    steps = [built(TOKENS[:, :5], cache=cache)] + [built(TOKENS[:, i : i + 1], cache=cache) for i in range(5, 32)]
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-4


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens after 0 cached positions in a context of 32"):
        decoder(shape())(torch.zeros(1, 33, dtype=torch.long))


def test_the_decoder_compiles_into_one_graph() -> None:
    report = torch._dynamo.explain(decoder(shape(kv_heads=2)))(TOKENS, TOKENS, documents_of(TOKENS, 3))
    assert report.graph_count == 1, report.break_reasons


@pytest.mark.parametrize("window", [None, 9])
def test_a_compiled_layer_takes_any_number_of_documents_and_has_the_bits_of_an_eager_one(window: int | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = shape(kv_heads=2, family="mistral", sliding_window=window)
    eager, compiled = decoder(model), decoder(model)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in compiled.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for end in (300, 3, 7):  # no token ends a document, or some do
        segments = documents_of(TOKENS % 40, end)
        gradients = []
        for built in (eager, compiled):
            built.zero_grad()
            built(TOKENS, TOKENS.roll(-1, 1), segments).backward()
            gradients.append([parameter.grad for parameter in built.parameters()])
        assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    assert counter.frame_count == 1
