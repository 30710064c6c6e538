"""Digests of pushed images in an overlay."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "manifests/overlays/production/kustomization.yaml"


def pin(folder: Path, *images: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "images/pin.py"), str(folder), *images]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def test_an_overlay_names_the_images_by_the_digests_that_the_registry_gave(tmp_path: Path) -> None:
    file = tmp_path / "kustomization.yaml"
    file.write_text(OVERLAY.read_text())
    before = yaml.safe_load(file.read_text())
    for digit in "ab":  # the second release replaces the first
        process = pin(tmp_path, f"registry.example:5000/team/holdfast@sha256:{digit * 64}")
        assert process.returncode == 0, process.stderr
    assert pin(tmp_path, f"r/holdfast-train-cpu@sha256:{'c' * 64}").returncode == 0
    assert yaml.safe_load(file.read_text()) == {
        **before,
        "images": [
            {"name": "holdfast-train-cpu", "newName": "r/holdfast-train-cpu", "digest": f"sha256:{'c' * 64}"},
            {"name": "holdfast", "newName": "registry.example:5000/team/holdfast", "digest": f"sha256:{'b' * 64}"},
        ],
    }
    assert file.read_text().startswith(OVERLAY.read_text().splitlines()[0])


@pytest.mark.parametrize(
    "image", ["r/holdfast:0.1.0", "r/holdfast", "r/holdfast@sha256:0a", "r/other@sha256:" + "a" * 64]
)
def test_an_image_without_a_whole_digest_is_refused_and_nothing_is_written(image: str, tmp_path: Path) -> None:
    file = tmp_path / "kustomization.yaml"
    file.write_text(OVERLAY.read_text())
    process = pin(tmp_path, image)
    assert process.returncode == 2
    assert f"{image}: give an image of Holdfast by its digest" in process.stderr
    assert file.read_text() == OVERLAY.read_text()
