"""Commits of a Git repository in which DVC tracks data. DVC runs in this process: its command imports for seconds."""

import subprocess
from pathlib import Path

from dvc.repo import Repo

GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")


def commit(folder: Path, *tracked: str) -> None:
    """Commit the folder, with what DVC tracks as it is now. The first commit creates the repository."""
    if not (folder / ".git").exists():
        _git(folder, "init", "-q")
        Repo.init(str(folder)).close()
    with Repo(str(folder)) as repository:
        repository.add([str(folder / path) for path in tracked])
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "a commit")


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True)
