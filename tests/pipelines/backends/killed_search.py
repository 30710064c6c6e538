"""A search on a cluster whose controller is killed while the second trial runs, and started again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.pipelines.backends.interface import RunStatus
from holdfast.pipelines.backends.request import RunRequest, identify_request
from holdfast.pipelines.submitted_search import SubmittedSearch
from holdfast.scoring.comparison import Row, read_comparison
from holdfast.search.log import read_log
from holdfast.search.method import Search
from holdfast.store import Store
from tests.pipelines.backends.argo.test_emulated import small

SEARCH = Search("asha", ("training.optimizer.learning_rate=1e-3..1e-1 log",), 2, seed=2, reduction=2, min_steps=5)
KILL_AT = 2  # the run after whose end the controller is gone


class Killed(BaseException):
    """The controller is gone."""


def best_of_killed_search(
    folder: Path, store: Store, submit: Callable[[RunRequest], RunStatus], status: Callable[[str], RunStatus]
) -> Row:
    """Search with the small spec in `folder`. `submit` raises Killed after run KILL_AT. Returns the best trial."""
    wanted = identify_request(RunRequest(small(folder), store.url, search=SEARCH), shared_folders=True)

    def control() -> RunStatus:
        return SubmittedSearch(wanted, submit, status, lambda _: None, poll_seconds=0).run()[0]

    with pytest.raises(Killed):
        control()
    assert [entry.kind for entry in read_log(store, wanted.run_id)] == ["decision", "score", "decision"]
    end = control()
    assert end.exit_code == 0, end.message
    comparison = read_comparison(store, wanted.run_id)
    assert comparison is not None and len(comparison.stopped) == 1
    return comparison.best
