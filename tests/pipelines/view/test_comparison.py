"""The comparison of a sweep on the terminal."""

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
    assert ("\nbest  seed=1  " in output) is best
    assert ("no trial is blessed, so none is the best, and none is registered" in output) is not best


def test_a_table_of_eighty_columns_breaks_no_change_and_no_figure(tmp_path: Path) -> None:
    changes = ("training.optimizer.learning_rate=3e-3", "training.optimizer.kind=muon", "training.schedule.kind=wsd")
    row = Row(
        changes=changes, run_id="a1d8199cb7ebe9d8", step=3, training_loss=5.2944, loss=5.3148, perplexity=203.327,
        word="blessed", state_digest="ab",
    )  # fmt: skip
    other = row.model_copy(update={"word": "not_blessed"})
    comparison = Comparison(sweep_id="s", name="small-sweep", dataset_id="d", rows=(row, other))
    console = Console(record=True, width=80)
    print_comparison(console, comparison, open_store(f"file://{tmp_path}"))
    output = console.export_text()
    assert all(change in output for change in ("learning_rate=3e-3", "optimizer.kind=muon", "schedule.kind=wsd"))
    assert "5.3148  203.327" in output
    assert "a1d8199c\n" in output
