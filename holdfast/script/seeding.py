"""Random numbers of a script: seeds by step, and by the samples of a fetch.

No state of a generator is saved. At the start of each step the global generators of torch, numpy and Python get a seed
from (seed, step, rank). What a data set draws while it reads samples depends on the samples only, so neither the number
of loader workers nor the time of a fetch matters.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

from holdfast.rank.randomness import seed_torch, stream_seed

_FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")  # of torch's DataLoader, with a method `fetch`


def seed_all(seed: int, stream: str, number: int, rank: int = 0) -> None:
    """Seed the global generators of torch, numpy and Python for one named stream."""
    value = stream_seed(seed, stream, number, rank)
    seed_torch(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def generator(
    seed: int, stream: str, number: int, rank: int = 0, device: str | torch.device = "cpu"
) -> torch.Generator:
    """A generator of a named stream."""
    return torch.Generator(device).manual_seed(stream_seed(seed, stream, number, rank))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of the CPU at the end."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


_key: tuple[int, Callable[[], int], int] = (0, lambda: 0, 0)  # seed, epoch and rank of the fetches of this process


def key_fetches(seed: int, epoch: Callable[[], int], rank: int) -> None:
    """Seed each fetch of a DataLoader of this process by its indices, or by its number for an iterable data set. The
    global generators are as before afterwards. Raises ImportError if torch has no such fetchers."""
    global _key  # noqa: PLW0603 - a process has one session
    _key = (seed, epoch, rank)
    for name in _FETCHERS:
        fetcher = getattr(_utils.fetch, name, None)
        if fetcher is None:
            raise ImportError(f"torch {torch.__version__} has no {name}: fetches cannot be seeded by their samples")
        if not hasattr(fetcher.fetch, "seeded_by_samples"):
            fetcher.fetch = _keyed(fetcher.fetch, by_number=name == "_IterableDatasetFetcher")


def _keyed(fetch: Callable[..., Any], *, by_number: bool) -> Any:
    @wraps(fetch)
    def keyed(self: Any, possibly_batched_index: Any) -> Any:
        seed, epoch, rank = _key
        if by_number:  # an iterable data set: the number of the fetch, on its worker and rank
            self._fetch_number = number = getattr(self, "_fetch_number", -1) + 1
            worker = torch.utils.data.get_worker_info()
            stream = f"fetch {epoch()} {rank} {worker.id if worker else 0}"
        else:
            indices = possibly_batched_index if isinstance(possibly_batched_index, list) else [possibly_batched_index]
            stream, number = f"fetch {epoch()} {json.dumps([str(index) for index in indices])}", 0
        with kept_generators():
            seed_all(seed, stream, number)
            return fetch(self, possibly_batched_index)

    keyed.seeded_by_samples = True  # type: ignore[attr-defined]
    return keyed
