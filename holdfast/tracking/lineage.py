"""The lineage of a model as tags: the code's commit, the revisions of the data, texts of any length."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.dataset.manifest import Manifest
from holdfast.runtime.secrets import redact
from holdfast.spec.json_parsing import parse_json
from holdfast.tracking.artifacts import read_text, write_text

if TYPE_CHECKING:
    from mlflow import MlflowClient


def git_commit() -> str | None:
    """The commit of the code: HOLDFAST_GIT_COMMIT, which the images set. Without it, that of the Git repository around
    the working directory, with `-dirty` if files were changed. None without either."""
    if commit := os.environ.get("HOLDFAST_GIT_COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def whole_tags(client: MlflowClient, mlflow_run_id: str, tags: Mapping[str, str], longest: int) -> dict[str, str]:
    """`tags`, with each value at most `longest` characters. A longer text becomes an artifact of the MLflow run. Its
    tag becomes a JSON object (also valid YAML) with the address: `{"artifact": "runs:/<id>/lineage/<tag>"}`."""
    kept = dict(tags)
    for name, value in tags.items():
        if len(value) > longest:
            file = f"lineage/{name}"
            write_text(client, mlflow_run_id, value, file)
            kept[name] = json.dumps({"artifact": f"runs:/{mlflow_run_id}/{file}"})
    return kept


@dataclass(frozen=True)
class _Artifact:
    """The tag of a text that is an artifact."""

    artifact: str


def whole_text(client: MlflowClient, tag: str) -> str:
    """The text of a tag: its own, or that of the artifact in this MLflow that it names."""
    if not tag.startswith('{"artifact":'):
        return tag
    address = parse_json(tag, _Artifact, "a tag of MLflow").artifact
    mlflow_run_id, _, path = address.removeprefix("runs:/").partition("/")
    return read_text(client, mlflow_run_id, path)


def dvc_revisions(manifest: Manifest) -> dict[str, str]:
    """URI to Git commit, for the sources that DVC tracks."""
    return {
        redact(source.uri): source.lineage.revision or "" for source in manifest.sources if source.lineage.kind == "dvc"
    }
