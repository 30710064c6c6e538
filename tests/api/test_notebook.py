"""The example notebook: its cells are run one after another, as a reader does, with a small spec."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import empty_mlflow
from tests.whole.small import environment, write_corpus, write_spec

ROOT = Path(__file__).parents[2]


@pytest.mark.drill
def test_every_cell_of_the_example_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "commit it without outputs"
    cells = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    example = "examples/quickstart.yaml"
    assert cells.count(example) == 1
    write_corpus(tmp_path)
    empty_mlflow.place(tmp_path / "home")
    cells = cells.replace(example, os.fspath(write_spec(tmp_path)))
    result = subprocess.run(
        [sys.executable, "-c", cells],
        cwd=tmp_path, env=environment(tmp_path / "home", PYTHONPATH=str(ROOT)), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "blessed" in result.stdout
