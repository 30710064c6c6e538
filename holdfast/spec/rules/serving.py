"""Rules of `serving`, and of `store`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.spec.cluster import amount
from holdfast.spec.errors import Problem
from holdfast.spec.rules.secrets import carries_secret
from holdfast.spec.tree import Spec


def check_store(spec: Spec) -> Iterator[Problem]:
    """The store has a supported scheme."""
    if spec.store is not None and not re.match(r"file:///|s3://[^/]", spec.store):
        shown = "(hidden)" if carries_secret(spec.store) else spec.store
        yield Problem("store", shown, "is neither file:/// nor s3://", "use file:///path or s3://bucket/prefix")


def check_serving(spec: Spec) -> Iterator[Problem]:
    """KServe finds the weights in a bucket, and its pods request resources that exist."""
    kserve = spec.serving.kserve
    if kserve is None:
        return
    if spec.store is not None and spec.store.startswith("file:"):
        yield Problem(
            "serving.kserve", "(given)", f"cannot read from store = {spec.store}", "use a store in S3, or remove it"
        )
    if kserve.accelerators and spec.cluster.accelerator == "cpu":
        yield Problem(
            "serving.kserve.accelerators", kserve.accelerators, "is not possible with cluster.accelerator: cpu",
            "use 0, or name an accelerator",
        )  # fmt: skip
    if kserve.min_replicas > kserve.max_replicas:
        yield Problem(
            "serving.kserve.min_replicas", kserve.min_replicas, f"is above max_replicas = {kserve.max_replicas}",
            f"use at most {kserve.max_replicas}",
        )  # fmt: skip
    for name in ("cpu", "memory"):
        if not amount(getattr(kserve, name)):
            yield Problem(f"serving.kserve.{name}", getattr(kserve, name), "requests nothing", "request more than zero")
