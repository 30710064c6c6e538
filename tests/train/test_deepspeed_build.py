"""A rank that was killed while torch builds DeepSpeed's collectives holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

LOAD = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from holdfast.components.train.engines.deepspeed.engine import load_shared_memory_collectives
load_shared_memory_collectives()
from deepspeed.accelerator import get_accelerator
print("loaded", get_accelerator().create_op_builder("ShareMemCommBuilder").load() is not None)
"""


def test_the_lock_of_a_dead_builder_is_taken_away(tmp_path: Path) -> None:
    """The file is what torch leaves: without the mend every later rank waits for it, and this test for its deadline."""
    from torch.utils.cpp_extension import get_default_build_root

    built = Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(built))}
    root = Path(environment["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm"
    if not list(root.glob("*.so")):  # nothing built here yet: a copy of nothing would be a compilation in a test
        environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
        root = tmp_path / "deepspeed_shm_comm"
    root.mkdir(parents=True, exist_ok=True)
    (root / "lock").touch()
    ranks = [
        subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate()
        assert (rank.returncode, said.strip().splitlines()[-1]) == (0, "loaded True")
