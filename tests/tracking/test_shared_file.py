"""MLflow's file in the home of a group: its members write to it, and one who may only read it is told so early."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.tracking import connect, require_usable
from holdfast.tracking.connection import translated
from tests.store.test_shared_folder import FIRST, GROUP, SECOND, as_user, shared
from tests.tracking import made

__all__ = ["shared"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become other users")
def test_a_group_shares_mlflows_file_and_one_who_may_only_read_it_is_refused_before_the_training(
    shared: Path, bare_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = shared / "mlflow.db"
    uri = f"sqlite:///{database}"
    umask = os.umask(0o007)
    try:
        connect(uri)  # creates it
    finally:
        os.umask(umask)
    connect().search_experiments()  # of another file: a child has loaded all modules
    os.chown(database, FIRST, GROUP)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    def write(name: str) -> Callable[[], object]:
        def work() -> None:
            client = connect(f"{uri}?timeout=5")  # MLflow keeps the parent's connections of the same address
            with translated(uri):
                client.create_experiment(name)

        return work

    assert as_user(SECOND, GROUP, 0o007, write("one")) == ""
    database.chmod(0o640)
    refused = as_user(SECOND, GROUP, 0o007, write("two"))
    assert refused.startswith("TrackingUnavailable: MLflow at")
    assert "make the file and its folder writable for this user" in refused
    early = as_user(SECOND, GROUP, 0o007, lambda: require_usable(made.spec()))
    assert early.startswith("AccessDeniedError: MLflow in")
    assert str(database) in early
    require_usable(made.spec())
