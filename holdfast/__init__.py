"""Holdfast: LLM training pipelines on Kubeflow and Argo that survive anything.

The one import name of the distribution; `run`, `submit`, `runs`, `Run` and `Spec` are for scripts and notebooks. In the
repository the top-level `components` and `pipelines` are links to the folders of these names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import Checkpoint, Report, Run, RunFailedError, Spec, load_spec, run, runs, submit

__all__ = ["Checkpoint", "Report", "Run", "RunFailedError", "Spec", "load_spec", "run", "runs", "submit"]


def __getattr__(name: str) -> object:
    """Import the API when it is first asked for: steps and ranks import this package, and need none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from holdfast import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
