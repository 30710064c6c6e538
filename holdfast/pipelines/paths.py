"""Local paths in a spec: relative to the working directory of the command, while steps may run elsewhere."""

from __future__ import annotations

from pathlib import Path

from holdfast.spec import Spec
from holdfast.spec.data import Data, Source


def absolute(path: str) -> str:
    """Make a local path absolute; a path with a scheme (`s3://`, `python:`, `dvc:`) stays as it is."""
    scheme, colon, _ = path.partition(":")
    if colon and scheme.isalnum() and len(scheme) > 1:
        return path
    return str(Path(path).expanduser().absolute())


def store_root(url: str) -> str:
    """The URL of a store from a URL or the path of a folder."""
    return url if "://" in url else Path(absolute(url)).as_uri()


def with_absolute_paths(spec: Spec) -> Spec:
    """Make every local path of the spec absolute, from the working directory. The result describes the same run."""
    data: Data = spec.data.model_copy(update={"sources": tuple(_source(source) for source in spec.data.sources)})
    if data.tokenizer.path:
        tokenizer = data.tokenizer.model_copy(update={"path": absolute(data.tokenizer.path)})
        data = data.model_copy(update={"tokenizer": tokenizer})
    if data.chat.template:
        data = data.model_copy(update={"chat": data.chat.model_copy(update={"template": absolute(data.chat.template)})})
    model = spec.model
    if model.init_from:
        model = model.model_copy(update={"init_from": absolute(model.init_from)})
    return spec.model_copy(update={"data": data, "model": model})


def _source(source: Source) -> Source:
    if source.uri.startswith("dvc:"):
        return source.model_copy(update={"repo": absolute(source.repo) if _is_local(source.repo) else source.repo})
    return source.model_copy(update={"uri": absolute(source.uri)})


def _is_local(repo: str) -> bool:
    return "://" not in repo and "@" not in repo
