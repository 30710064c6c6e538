"""Datasets of packed tokens: `Dataset.open`, then `training(...).batch(step)` and `validation(...)`.

It needs only numpy. The preprocess step writes datasets. `manifest` and `shards` define the shared format.
"""

from holdfast.dataset.batches import Batches, Prefetcher, Rows
from holdfast.dataset.dataset import Dataset
from holdfast.dataset.manifest import Manifest

__all__ = ["Batches", "Dataset", "Manifest", "Prefetcher", "Rows"]
