"""Content-addressed identity: the same inputs are the same run.

The run id is a digest over what model is asked for: the fields that say it, the dataset id and the version of the data
plane's arithmetic. How it is computed (layout, micro-batch, accelerator) is the plan, which a run records and may
change; where a thing is kept, how often it is saved and how it is evaluated are left out of both.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3
from pydantic import BaseModel

from holdfast.spec.section import Role, Section, role_of
from holdfast.spec.tree import Spec

# Raised by hand whenever a change of the code changes the bits that come out of a run.
DATA_PLANE_VERSION = 2  # 2: the loss is a sum over counted tokens divided once, no longer a mean of means
ID_LENGTH = 16  # hexadecimal digits: 64 bits


def digest(value: object) -> str:
    """A digest of any JSON value, independent of key order. 64 bits in hexadecimal."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return blake3(canonical.encode()).hexdigest()[:ID_LENGTH]


def fields_of(section: BaseModel, role: Role = "identity") -> dict[str, Any]:
    """The fields of a section that have `role`, as JSON values. What stands in a section or a list with a role of its
    own has that role."""
    kept: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        own: Role = role_of(type(section), name) if isinstance(section, Section) else role
        if isinstance(value, BaseModel) and own == "identity":
            if nested := fields_of(value, role):
                kept[name] = nested
        elif own != role:
            continue
        elif isinstance(value, tuple):
            kept[name] = [fields_of(item, role) if isinstance(item, BaseModel) else item for item in value]
        else:
            kept[name] = value
    return kept


def run_id(spec: Spec, dataset_id: str, salt: str = "", first_weights: str = "") -> str:
    """The identity of a training run. `salt` (from `--fresh`) makes it another run with the same inputs;
    `first_weights` is the digest of the weights that `model.init_from` names, and stands for their place."""
    asked = fields_of(spec)
    if first_weights:
        asked["model"]["init_from"] = first_weights
    if spec.training.optimizer.kind == "adamw":
        del asked["training"]["optimizer"]["kind"]  # the only one when runs began to have ids
    asked.pop("data")  # the dataset id stands for it, and for the bytes as well...
    asked["document_masks"] = spec.data.document_masks  # ...except what is decided when batches are read
    asked["shuffle"] = spec.data.shuffle.model_dump()
    asked["weights"] = [source.weight for source in spec.data.sources]
    if spec.training.gradient_compression == "topk":
        asked["topk_fraction"] = spec.training.topk_fraction  # means nothing else: ids of runs without it have none
    if spec.training.determinism == "elastic":
        asked["grain"] = spec.training.micro_batch  # sums are made of these, the same at every layout
    return digest({"version": DATA_PLANE_VERSION, "dataset": dataset_id, "spec": asked, "salt": salt})
