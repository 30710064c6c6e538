#!/opt/holdfast/venv/bin/python
"""`holdfast-selfcheck`: does this container have what its steps need? Prints JSON; ends with 1 and the reasons if not.

It runs at the end of every build, and answers a person or a probe inside a pod: versions, commit, torch's backends,
devices, and whether the places that Holdfast writes to can be written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import version
from typing import Any

LIBRARIES = {
    "light": ("kfp", "kubernetes", "mlflow", "flask_wtf", "tokenizers", "pyarrow", "dvc.api", "boto3"),
    "train": ("kfp", "mlflow", "tokenizers", "deepspeed", "boto3"),
    "ray": ("kfp", "mlflow", "tokenizers", "pyarrow", "dvc.api", "deepspeed", "boto3", "ray.job_submission"),
}
PROGRAMS = {  # that its pods are started with
    "ray": ("ray", "python", "bash"),
}


def main() -> int:
    """Look at everything, print it, and say whether it is enough."""
    kind, _, variant = os.environ.get("HOLDFAST_IMAGE", "light").partition("-")
    problems: list[str] = []
    with contextlib.redirect_stdout(sys.stderr):  # some libraries talk when they are imported
        for module in (*_modules(kind), *LIBRARIES[kind]):
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - any error of an import is the finding
                problems.append(f"{module} cannot be imported: {type(error).__name__}: {error}")
        torch = _torch(kind, variant, problems)
    problems += [f"{name} is not in PATH" for name in PROGRAMS.get(kind, ()) if not shutil.which(name)]
    for name in ("TMPDIR", "HOME"):
        folder = os.environ.get(name) or tempfile.gettempdir()
        if not os.access(folder, os.W_OK):
            problems.append(f"{name}: {folder} cannot be written: mount an emptyDir at /tmp")
    if os.geteuid() == 0:
        problems.append("the container runs as root: leave runAsUser to the image, or name another user than 0")
    found = {
        "image": os.environ.get("HOLDFAST_IMAGE"),
        "holdfast": version("holdfast"),
        "commit": os.environ.get("HOLDFAST_GIT_COMMIT") or None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "uid": os.geteuid(),
        "torch": torch,
        "problems": problems,
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 1 if problems else 0


def _torch(kind: str, variant: str, problems: list[str]) -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        problems.append(f"torch cannot be imported: {error}")
        return {}
    wants_cpu = kind == "light" or variant == "cpu"
    if wants_cpu and torch.version.cuda:
        problems.append(
            f"torch {torch.__version__} carries CUDA {torch.version.cuda}, gigabytes that no step of this image uses: "
            "build without TORCH, or name a CPU wheel in it (images/build.sh)"
        )
    if variant == "nvidia" and not (torch.version.cuda and dist.is_nccl_available()):
        problems.append(f"torch {torch.__version__} has no CUDA or no NCCL: build with a torch wheel that has both")
    if variant == "amd" and not (torch.version.hip and dist.is_nccl_available()):
        problems.append(f"torch {torch.__version__} has no ROCm or no RCCL: build from a base image that brings it")
    for backend, module in (("ascend", "torch_npu"), ("gaudi", "habana_frameworks.torch")):
        if variant == backend:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - any error of an import is the finding
                problems.append(f"{module} cannot be imported: {error}: build from a base image that brings it")
    if kind != "light" and not shutil.which("g++"):
        problems.append("g++ is missing: torch.compile builds its kernels with it")
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gloo": dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
    }


def _modules(kind: str) -> tuple[str, ...]:
    """What this image exists to run."""
    from holdfast.steps import STEPS

    if kind == "train":
        return ("holdfast.rank.worker", "holdfast.components.evaluate.__main__")
    steps = tuple(f"holdfast.components.{step}.__main__" for step in STEPS)
    if kind == "ray":
        return (*steps, "holdfast.rank.worker", "holdfast.pipelines.backends.ray.driver")
    return steps


if __name__ == "__main__":
    sys.exit(main())
