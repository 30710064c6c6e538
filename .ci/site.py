"""What mkdocs does not do by itself: the README is the first page of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the text of each page: its links to the README lead to the first page."""
    return markdown.replace("](../README.md", "](index.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the README. Its links to pages become those of the site; its links to other files of the
    repository lead there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    names = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.name != "docs")
    readme = re.sub(rf"\]\((?=(?:{names})[/)#])", f"]({config.repo_url}/blob/main/", readme)
    files.append(File.generated(config, "index.md", content=readme))
    return files
