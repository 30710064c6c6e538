"""Output for the user when a step fails."""

from pathlib import Path

import pytest

from tests.whole.small import holdfast, objects, only, write_corpus, write_spec


@pytest.mark.slow
def test_bad_data_fails_with_its_code_its_reason_and_a_summary(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus/bad.txt").write_bytes(b"not \xff\xfe text")
    write_spec(tmp_path)
    result = holdfast(tmp_path, "spec.yaml")
    assert result.returncode == 11, result.stdout + result.stderr
    assert "✗ preprocess" in result.stdout
    assert "bad.txt" in result.stdout
    assert "KFP" not in result.stdout
    assert "Traceback" not in result.stdout
    summary = only(tmp_path, "runs/*/summary.json")
    assert (summary["status"], summary["failed_step"]) == ("failed", "preprocess")
    assert "bad.txt" in summary["reason"]
    assert objects(tmp_path, "datasets/*/dataset.json") == []
