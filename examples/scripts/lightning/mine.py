"""A small language model for Lightning, and its samples: without Holdfast."""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

VOCABULARY, CONTEXT = 64, 16


class LitGPT(L.LightningModule):
    """A causal model of two blocks with its optimizer and schedule."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """The loss of a batch that is not trained on, for the schedule."""
        loss = cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("validation_loss", loss, sync_dist=True)  # one schedule for all ranks

    def configure_optimizers(self) -> dict:
        """AdamW, with a learning rate that falls when the validation loss does not."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation_loss"}}


class Sequences(Dataset):
    """Arithmetic sequences of tokens, of which one token each is drawn."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = (self.first + index + torch.arange(CONTEXT + 1) * (1 + index % 5)) % VOCABULARY
        tokens[torch.randint(CONTEXT, ())] = torch.randint(VOCABULARY, ())
        return tokens


def loaders() -> tuple[DataLoader, DataLoader]:
    """Loaders to train, in a new order in each epoch, and to validate."""
    return DataLoader(Sequences(0, 18), batch_size=2, shuffle=True), DataLoader(Sequences(32, 4), batch_size=2)
