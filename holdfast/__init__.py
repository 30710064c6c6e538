"""Holdfast: LLM training pipelines on Kubeflow and Argo that resume bit for bit.

The one import name of the distribution. The names of `__all__` are for scripts and notebooks. In the
repository the top-level `components` and `pipelines` are links to the folders of these names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import (
        Checkpoint,
        ClusterOptions,
        Location,
        Report,
        Run,
        RunFailedError,
        RunState,
        Spec,
        Stopped,
        Submission,
        backend_runs,
        comparison,
        diff_runs,
        load_spec,
        preview,
        request,
        resume,
        run,
        run_state,
        runs,
        stop,
        submit,
    )
    from holdfast.script.interface import PreemptionExit, Session
    from holdfast.script.session import session
    from holdfast.script.tree import StateError

__all__ = [
    "Checkpoint",
    "ClusterOptions",
    "Location",
    "PreemptionExit",
    "Report",
    "Run",
    "RunFailedError",
    "RunState",
    "Session",
    "Spec",
    "StateError",
    "Stopped",
    "Submission",
    "backend_runs",
    "comparison",
    "diff_runs",
    "load_spec",
    "preview",
    "request",
    "resume",
    "run",
    "run_state",
    "runs",
    "session",
    "stop",
    "submit",
]


_OF_SCRIPTS = ("PreemptionExit", "Session", "StateError", "session")


def __getattr__(name: str) -> object:
    """Import the API on first access. Steps and ranks import this package and do not need the API."""
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name in _OF_SCRIPTS:  # they need torch
        from holdfast.script import session as scripts

        return getattr(scripts, name)
    from holdfast import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
