"""The documentation as a site: every link has a target, every page is in its navigation, and the API has its pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning_and_shows_the_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert 'id="holdfast.store.Store.put_if_absent"' in (tmp_path / "api/index.html").read_text()
    assert "make demo" in (tmp_path / "index.html").read_text()


def test_every_decision_is_in_the_navigation_by_number() -> None:
    names = re.findall(r"decisions/(\d+.*\.md)", (ROOT / "mkdocs.yml").read_text())
    assert names
    assert names == sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
