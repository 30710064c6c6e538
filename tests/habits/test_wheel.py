"""The installed package is one complete import name, and ignores a user's folders with the names of ours."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files of the repository, without a package index."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if name.split("/")[0] in ("holdfast", "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, check=True)
    (file,) = folder.glob("*.whl")
    return file


def test_a_wheel_holds_every_module_and_file_and_one_import_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert inside == {name for name in tracked if name.startswith("holdfast/")}


def test_a_users_folders_of_our_names_change_nothing(wheel: Path, tmp_path: Path) -> None:
    """Every Kubeflow repository has `components` and `pipelines`: they come first on the path and stay the user's."""
    site, user_folder = tmp_path / "site", tmp_path / "mine"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for folder in ("components", "pipelines"):
        (user_folder / folder).mkdir(parents=True)
        (user_folder / folder / "__init__.py").write_text("print('mine')\n")
    (user_folder / "spec.yaml").write_text("name: theirs\ndata: {sources: [{uri: text.txt}]}\n")
    environment = {**os.environ, "PYTHONPATH": str(site), "HOLDFAST_HOME": str(tmp_path / "home")}

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=user_folder, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert "spec.yaml" in python("-m", "holdfast.pipelines.cli", "validate", "spec.yaml")
    output = python("-c", "import components, pipelines, holdfast.spec as ours; print(ours.__file__)")
    assert output.split() == ["mine", "mine", str(site / "holdfast/spec/__init__.py")]
