"""A model that misses its bounds is not registered."""

from __future__ import annotations

from pathlib import Path

from tests.whole.small import holdfast, objects, only, write_corpus, write_spec


def test_a_model_that_is_not_blessed_ends_with_three_and_is_not_registered(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path, evaluation={"max_perplexity": 1.0001})
    done = holdfast(tmp_path, "spec.yaml")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "not blessed" in done.stdout
    assert "perplexity" in done.stdout
    assert objects(tmp_path, "runs/*/registrations/*.json") == []
    assert only(tmp_path, "runs/*/summary.json")["verdict"] == "not_blessed"
