"""A small language model and its rows: plain torch, without Holdfast."""

import torch
from torch import nn

VOCABULARY, CONTEXT = 64, 16


class TinyGPT(nn.Module):
    """A causal model of two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        hidden = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def rows(step: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one rank at one step: a function of the step, so no loader has state."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    tokens = (start + torch.arange(CONTEXT + 1) * (1 + start % 3)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]
