"""A driver with one accelerator for NVIDIA's real binding: `nvml.c`, compiled. It reads its figures from files."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads
FIGURES = "NVML_FIGURES"
USUAL = {
    "mig": 0, "millijoules": 1_000_000, "milliwatts": 512_000, "busy": 90, "memory_used": 60 << 30, "celsius": 71,
    "megahertz": 1755, "reasons": 0x4,
}  # fmt: skip


def compiled(folder: Path) -> Path:
    """The library in `folder`. Without a compiler, the test is skipped."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("no C compiler, so no driver for the binding")
    path = folder / LIBRARY
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(path), str(SOURCE)], check=True
    )
    return path


class Driver:
    """The driver's figures, whose names are in `USUAL`. A test sets them; None means not supported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.tell(**USUAL)

    def tell(self, **figures: int | None) -> None:
        """Set figures from now on. A negative number is an error with that code."""
        for name, value in figures.items():
            path = self.folder / name
            path.unlink(missing_ok=True)
            if value is not None:
                path.write_text(str(value))


def install(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Install the driver for this process and the device `cuda:0`, until `monkeypatch` is undone."""
    import ctypes

    import pynvml

    driver = Driver(folder)
    monkeypatch.setenv(FIGURES, str(folder))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="12-34"))
    return driver
