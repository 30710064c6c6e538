"""From a spec to the KFP pipeline as IR YAML: the file that Kubeflow takes and that `holdfast run` executes.

Promises the same bytes for the same spec. KFP's own writer repeats the defaults in a comment that a spec of several
lines breaks out of, so the document is written here, with texts of several lines as blocks that a person can read.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import yaml

from components.spec import Spec, dump_spec
from components.spec.errors import AccessDeniedError, NoSpaceError

HEADER = "# Compiled by Holdfast from the spec `{name}`, for Kubeflow Pipelines.\n"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as literal blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def pipeline_ir(spec: Spec, image: str | None = None) -> dict[str, Any]:
    """The pipeline of `spec` as KFP's PipelineSpec in JSON. `image` replaces the default image of every step."""
    from google.protobuf import json_format

    from pipelines.training import training_pipeline

    ir = json_format.MessageToDict(training_pipeline(spec.name, dump_spec(spec), image).pipeline_spec)
    assert isinstance(ir, dict)
    return ir


def compile_pipeline(spec: Spec, path: Path, image: str | None = None) -> None:
    """Write the pipeline of `spec` to `path` as YAML, in whole or not at all. Raises AccessDeniedError or
    NoSpaceError."""
    text = HEADER.format(name=spec.name) + yaml.dump(
        pipeline_ir(spec, image), Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=120
    )
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
        raise kind(f"{path}: cannot be written: {error.strerror}; name another file with --output") from error
