"""Submission of a search whose trials run on a cluster. This process controls it until it has ended."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from holdfast.api.submission import Submission
from holdfast.pipelines.backends.interface import Backend, RunStatus
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.submitted_search import SubmittedSearch
from holdfast.pipelines.view.comparison import print_comparison
from holdfast.pipelines.view.terminal import SafeConsole


def run_search(
    target: Backend, wanted: RunRequest, console: Console | None, submit: Callable[[RunRequest], RunStatus]
) -> Submission:
    """Control the search `wanted` on `target`. `submit` starts or finds the run of a trial, and keeps its record."""
    shown = console or SafeConsole()
    shown.print(f"{wanted.title} {wanted.run_id} on {target.name}. Ctrl-C ends this controller and no trial.")
    search = SubmittedSearch(
        wanted, submit, target.status, lambda line: shown.print(line, markup=False, highlight=False, soft_wrap=True)
    )
    status, comparison = search.run()
    if comparison is None:
        text = f"\nerror: {status.message}\nThe same command resumes the search."
        shown.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        print_comparison(shown, comparison, search.store)
    return Submission(replace(status, backend=target.name), True, wanted, store=search.store.url)
