"""A tiny model, sequences and a collator that draws: without Holdfast."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, attention_dropout=0.1, **sizes))


class Sequences(torch.utils.data.Dataset):
    """Arithmetic sequences of tokens."""

    def __init__(self, count: int = 16) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + torch.arange(16) * (1 + index % 5)) % 64


def masked(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch in which each token is left out of the loss with a chance of 15 %: the collator draws."""
    tokens = torch.stack(samples)
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.15, -100)
    return {"input_ids": tokens, "labels": labels}
