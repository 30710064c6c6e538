"""Content-addressed identity: the same inputs are the same run.

The run id is a digest over the fields that influence the weights, the dataset id and the version of the data plane's
arithmetic. Where a thing is kept, how often it is saved and how it is evaluated are left out.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3
from pydantic import BaseModel

from holdfast.components.spec.section import Section, influences_weights
from holdfast.components.spec.tree import Spec

# Raised by hand whenever a change of the code changes the bits that come out of a run.
DATA_PLANE_VERSION = 1
ID_LENGTH = 16  # hexadecimal digits: 64 bits


def digest(value: object) -> str:
    """A digest of any JSON value, independent of key order. 64 bits in hexadecimal."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return blake3(canonical.encode()).hexdigest()[:ID_LENGTH]


def weight_fields(section: BaseModel) -> dict[str, Any]:
    """The fields of a section that influence the weights, as JSON values."""
    kept: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(section, Section) and not influences_weights(type(section), name):
            continue
        if isinstance(value, BaseModel):
            if nested := weight_fields(value):
                kept[name] = nested
        elif isinstance(value, tuple):
            kept[name] = [weight_fields(item) if isinstance(item, BaseModel) else item for item in value]
        else:
            kept[name] = value
    return kept


def run_id(spec: Spec, dataset_id: str, salt: str = "", first_weights: str = "") -> str:
    """The identity of a training run. `salt` (from `--fresh`) makes it another run with the same inputs;
    `first_weights` is the digest of the weights that `model.init_from` names, and stands for their place."""
    influences = weight_fields(spec)
    if first_weights:
        influences["model"]["init_from"] = first_weights
    influences.pop("data")  # the dataset id stands for it, and for the bytes as well...
    influences["document_masks"] = spec.data.document_masks  # ...except what is decided when batches are read
    influences["weights"] = [source.weight for source in spec.data.sources]
    return digest({"version": DATA_PLANE_VERSION, "dataset": dataset_id, "spec": influences, "salt": salt})
