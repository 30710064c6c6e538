"""Check that the training operator starts the pods of a job all together or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.custom_resources import PYTORCHJOBS, TRAINING_OPERATOR, VOLCANO_QUEUES
from holdfast.pipelines.doctor.findings import Finding

NAME = "gang scheduling"
LABEL = "control-plane=kubeflow-training-operator"
OPTION = "--gang-scheduler-name=volcano"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the gang scheduler in the operator's arguments."""
    if PYTORCHJOBS not in cluster.served:
        return
    found = cluster.api.read("/apis/apps/v1/deployments", labelSelector=LABEL)
    if not found or not found["items"]:
        remedy = f"install the training operator: {TRAINING_OPERATOR}"
        yield Finding(NAME, "warn", f"no deployment carries {LABEL}", remedy)
        return
    operator = found["items"][0]
    container = operator["spec"]["template"]["spec"]["containers"][0]
    words = " ".join([*container.get("command", []), *container.get("args", [])])
    named = re.search(r"--gang-scheduler-name[= ](\S+)", words)
    scheduler = named[1] if named else "none"
    about = f"{container['image']} schedules gangs with {scheduler}"
    needed = cluster.scheduler == "volcano" and cluster.job == "pytorchjob"
    if scheduler == "volcano" or not (needed or VOLCANO_QUEUES in cluster.served):
        yield Finding(NAME, "ok", about)
        return
    arguments = "/spec/template/spec/containers/0/args"
    there = bool(container.get("args"))
    patch = {"op": "add", "path": f"{arguments}/-" if there else arguments, "value": OPTION if there else [OPTION]}
    where = f"-n {operator['metadata']['namespace']} deployment/{operator['metadata']['name']}"
    yield Finding(
        NAME, "fail" if needed else "warn",
        f"{about}: half of a job may start, and wait for the other half",
        f"kubectl patch {where} --type json -p '{json.dumps([patch], separators=(',', ':'))}'",
    )  # fmt: skip
