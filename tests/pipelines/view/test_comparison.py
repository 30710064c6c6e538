"""The comparison of a sweep on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from holdfast.pipelines.view.comparison import print_comparison
from holdfast.scoring.comparison import Comparison, Row
from holdfast.store import open_store


@pytest.mark.parametrize(("word", "best"), [("blessed", True), ("not_blessed", False)])
def test_a_trial_is_the_best_only_if_it_is_blessed(tmp_path: Path, word: str, best: bool) -> None:
    row = Row(
        changes=("training.seed=1",), run_id="1", step=3, training_loss=1, loss=1, perplexity=2.7, word=word,
        state_digest="ab",
    )  # fmt: skip
    other = row.model_copy(update={"run_id": "2", "loss": 2.0, "word": "not_blessed"})
    comparison = Comparison(sweep_id="s", name="small-sweep", dataset_id="d", rows=(row, other))
    console = Console(record=True, width=150)
    print_comparison(console, comparison, open_store(f"file://{tmp_path}"))
    output = console.export_text()
    assert ("│ best │" in output) is best
    assert ("no trial is blessed, so none is the best, and none is registered" in output) is not best
