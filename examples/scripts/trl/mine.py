"""A tiny model, a tokenizer of words, and chats: without Holdfast, and without a download."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", "<unknown>", "count", "from", "to", *map(str, range(58))]


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, attention_dropout=0.1, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


def _count(first: int, step: int) -> str:
    return " " + " ".join(str((first + step * number) % 58) for number in range(8))


def answers(count: int = 18) -> Dataset:
    """Prompts and their completions."""
    return Dataset.from_list([{"prompt": f"count from {n}", "completion": _count(n, 1)} for n in range(count)])


def preferences(count: int = 18) -> Dataset:
    """Prompts with a better and a worse completion."""
    rows = [{"prompt": f"count from {n}", "chosen": _count(n, 1), "rejected": _count(n, 2)} for n in range(count)]
    return Dataset.from_list(rows)
