"""Optional packages, and the extra of Holdfast that installs each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from holdfast.spec.errors import MissingError

# Name of the imported module -> the extra that contains it.
EXTRAS = {
    "tokenizers": "train",
    "torch": "train",
    "pcodec": "train",
    "tqdm": "train",
    "pyarrow": "preprocess",
    "zstandard": "preprocess",
    "dvc": "dvc",
    "dvc_s3": "dvc",
    "deepspeed": "deepspeed",
    "prometheus_client": "metrics",
    "pynvml": "nvml",
    "tensorboard": "tensorboard",
    "opentelemetry": "otel",
    "mlflow": "tracking",
    "psycopg": "tracking",
    "kfp": "pipelines",
    "kfp_server_api": "pipelines",
    "hera": "pipelines",
    "kubernetes": "pipelines",
    "jinja2": "pipelines",
    "huggingface_hub": "pipelines",
    "typer": "pipelines",
    "rich": "pipelines",
    "jsonschema": "pipelines",
    "lm_eval": "tasks",
    "ray": "ray",
    "moto": "chaos",
}


def missing_package(error: BaseException) -> MissingError | None:
    """What to install, if the exception is caused by a missing package of an extra. Otherwise None."""
    for cause in _causes(error):
        module = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if module in EXTRAS and find_spec(module) is None:  # otherwise an installed version lacks a module
            return MissingError(_words(module, "this command"))
    return None


def require_package(module: str, use: str, instead: str = "") -> None:
    """Raises MissingError if the package of an extra that `use` needs is not installed."""
    if find_spec(module) is None:
        raise MissingError(_words(module, use) + (f", or {instead}" if instead else ""))


def _words(module: str, use: str) -> str:
    package = {"deepspeed": "DeepSpeed", "ray": "Ray"}.get(module, f"the package {module}")
    return f"{use} needs {package}, which is not installed here: pip install 'holdfast[{EXTRAS[module]}]'"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
