"""A finished and blessed run with a small real model, and an empty MLflow on SQLite."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.root import root_bytes
from holdfast.spec import Spec
from holdfast.store import Store, layout, open_store
from tests.exports import write_export
from tests.model import tiny_model
from tests.tracking import made
from tests.tracking.conftest import bare_home, home, lasting_server, server

__all__ = ["bare_home", "home", "lasting_server", "server"]

STEP = 8
EXPORT = layout.export(made.RUN_ID, STEP, f"state-{made.RUN_ID}")
Finish = Callable[..., None]
FinishIn = Callable[[Store], Finish]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def finish(store: Store, finish_in: FinishIn) -> Finish:
    """Write the results of train and evaluate for a run, with optional changes to any part."""
    return finish_in(store)


@pytest.fixture
def finish_in(tmp_path: Path) -> FinishIn:
    """`finish` for any store."""
    return lambda store: partial(_finish, store, tmp_path)


def _finish(
    store: Store,
    tmp_path: Path,
    run_id: str = made.RUN_ID,
    spec: Spec | None = None,
    result: dict[str, Any] | None = None,
    verdict: dict[str, Any] | None = None,
    key: str = "settings-none",
) -> None:
    made.write_dataset(store)
    if run_id == made.RUN_ID:  # the history belongs to that run; a second write would replace its root
        made.write_history(store, 0, STEP)
    folder = tmp_path / f"export-{run_id}"
    names = tiny_model.export(folder, tiny_model.decoder(tiny_model.shape(), seed=int(run_id[:4], 16)))
    export, export_digest = write_export(store, run_id, STEP, f"state-{run_id}", folder, names)
    root = {"run_id": run_id, "step": STEP, "attempt": 1, "history": [], "state_digest": f"state-{run_id}"}
    store.put(layout.checkpoint(run_id, STEP), root_bytes(root))
    common = {"run_id": run_id, "state_digest": f"state-{run_id}", "step": STEP, "dataset_id": made.DATASET_ID}
    common["export_digest"] = export_digest
    document = {**common, "checkpoint": layout.checkpoint(run_id, STEP), "export": export, "loss": 1.25}
    store.put(layout.result(run_id), json.dumps({**document, **(result or {})}).encode())
    verdict_document = {
        **common,
        "key": key,
        "word": "blessed",
        "reasons": ["Perplexity 3.5 is below the bound 9."],
        "metrics": {"loss": 1.25, "bits_per_byte": 0.5},
        "champion": None,
        "settings": (spec or made.spec()).evaluation.model_dump(mode="json"),
    }
    store.put(layout.verdict(run_id, key), json.dumps({**verdict_document, **(verdict or {})}).encode())
