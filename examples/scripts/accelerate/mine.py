"""A small model and its samples: plain torch, without Holdfast."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def model() -> nn.Module:
    """A classifier with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


class Samples(Dataset):
    """Points with noise, and their classes."""

    def __init__(self, count: int = 18) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        point = torch.zeros(8)
        point[index % 8] = 1
        return point + 0.1 * torch.randn(8), index % 4


def loader() -> DataLoader:
    """A loader with a new order in each epoch."""
    return DataLoader(Samples(), batch_size=2, shuffle=True)
