"""Paths in a spec are meant from where the command is given; the steps may run elsewhere."""

from __future__ import annotations

from pathlib import Path

from holdfast.spec import Spec
from holdfast.spec.data import Data, Source


def absolute(path: str) -> str:
    """A local path made absolute; anything with a scheme (`s3://`, `python:`, `dvc:`) as it is."""
    scheme, colon, _ = path.partition(":")
    if colon and scheme.isalnum() and len(scheme) > 1:
        return path
    return str(Path(path).expanduser().absolute())


def store_root(url: str) -> str:
    """The URL of a store, given as one or as the path of a folder."""
    return url if "://" in url else Path(absolute(url)).as_uri()


def with_absolute_paths(spec: Spec) -> Spec:
    """The spec with every local path made absolute from the current folder. Spec and result describe the same run."""
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
