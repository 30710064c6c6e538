"""Which torch the setup and the images install: real pip on package indexes in a folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "images/torch.sh"
CUDA = ("2.13.0", 'Requires-Dist: nvidia-cudnn==9.19.0; platform_system == "Linux"\n')
CPU = ("2.13.0+cpu", "Requires-Dist: filelock\n")


def write_index(folder: Path, version: str, needs: str) -> str:
    """The URL of an index with one wheel of torch."""
    page = folder / "torch"
    page.mkdir(parents=True)
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(page / name, "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return folder.as_uri()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "own", "published", "requested", "installed"),
    [
        ("any", CUDA, CPU, "", "2.13.0+cpu"),
        ("any", CUDA, None, "", "2.13.0"),
        ("any", CUDA, CPU, "torch==2.13.0", "2.13.0"),
        ("cpu", CPU, None, "", "2.13.0+cpu"),
        ("cpu", CUDA, None, "", ""),
    ],
)
def test_a_machine_without_a_driver_gets_the_cpu_wheel_and_a_cpu_image_no_other(
    wanted: str,
    own: tuple[str, str],
    published: tuple[str, str] | None,
    requested: str,
    installed: str,
    tmp_path: Path,
) -> None:
    if wanted == "any" and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is an NVIDIA driver, whose machines get what pip's own index has")
    absent = (tmp_path / "absent").as_uri()
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1",
        "TORCH": requested,
        "PIP_INDEX_URL": write_index(tmp_path / "own", *own),
        "TORCH_CPU_INDEX": write_index(tmp_path / "published", *published) if published else absent,
    }  # fmt: skip
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [str(SCRIPT), wanted, *pip, "--target", str(tmp_path / "installed")]
    process = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    packages = [path.name for path in (tmp_path / "installed").glob("*.dist-info")]
    assert packages == ([f"torch-{installed}.dist-info"] if installed else []), process.stderr
    assert process.returncode == (0 if installed else 1)
    assert ("pip's own index" in process.stderr) == (published is None)
    assert ("with CUDA: 3 GB" in process.stderr) == (installed == "2.13.0")
    assert ("needs CUDA" in process.stderr) == (not installed)
