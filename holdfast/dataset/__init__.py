"""Reading datasets of packed tokens: `Dataset.open`, then `training(...).batch(step)` and `validation(...)`.

numpy only. What writes datasets is the preprocess step; the format they share is in `manifest` and `shards`.
"""

from holdfast.dataset.batches import Batches, Rows
from holdfast.dataset.dataset import Dataset
from holdfast.dataset.manifest import Manifest
from holdfast.dataset.prefetch import Prefetcher

__all__ = ["Batches", "Dataset", "Manifest", "Prefetcher", "Rows"]
