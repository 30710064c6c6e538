"""Rows of a prepared dataset for a training script: the batch of a step, without a position that is saved."""

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast.dataset import Dataset
from holdfast.dataset.batches import Batches, Prefetcher


class DatasetRows:
    """The rows of one rank. `session.dataset` creates it."""

    def __init__(self, dataset: Dataset, batches: Batches, rank: int, ranks: int) -> None:
        self._dataset, self._batches = dataset, batches
        size = batches.sizes.final // ranks
        self._mine = slice(rank * size, (rank + 1) * size)

    @property
    def dataset_id(self) -> str:
        """The identity of the dataset."""
        return self._dataset.dataset_id

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self._dataset.vocabulary

    @property
    def end_of_text(self) -> int:
        """The token that ends every document."""
        return self._dataset.end_of_text

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the dataset, for all ranks together."""
        return self._batches.samples

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of Hugging Face's tokenizer.json."""
        return self._dataset.tokenizer_json()

    def batch(self, step: int) -> Tensor:
        """The rows of this rank at `step`, from 0: int64 [rows, context + 1]. [:, :-1] are inputs, [:, 1:] targets.
        Raises DataError for a damaged shard."""
        return torch.from_numpy(self._batches.batch(step, self._mine))

    def batches(self, start: int, stop: int | None = None) -> Iterator[Tensor]:
        """The batches of the steps from `start` to `stop`, or without an end, read ahead in a thread."""
        with Prefetcher(self._batches, self._mine, start, stop=stop) as ahead:
            for _, rows in ahead:
                yield torch.from_numpy(rows)

    def validation(self, max_tokens: int) -> Iterator[Tensor]:
        """Held-out text, the same on every rank: int64 [n, context + 1], with at most `max_tokens` targets in total.
        Raises DataError without any."""
        for rows in self._dataset.validation(self._batches.context, max_tokens):
            yield torch.from_numpy(rows)
