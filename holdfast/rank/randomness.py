"""Determinism and randomness: the settings of `training.determinism`, and the keys of a step's random numbers."""

import os

import torch
from blake3 import blake3


def make_deterministic(level: str, threads: int) -> None:
    """Set torch up for a determinism level, before any computation.

    Every level but `off` requests deterministic kernels, and operations without one raise. It also disables the choice
    of kernels by timing. The number of CPU threads is fixed at every level, because it determines the order of sums.
    """
    torch.set_num_threads(threads)
    if level != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = level == "off"


def stream_seed(seed: int, stream: str, step: int, rank: int = 0) -> int:
    """The seed of one named random stream at one step. Streams never overlap and need no saved state."""
    key = f"stream\0{seed}\0{stream}\0{step}\0{rank}"
    return int.from_bytes(blake3(key.encode()).digest(8), "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed the global generators of torch. A build without an accelerator has only that of the CPU, and
    `torch.manual_seed` would format the stack of its caller for the rest."""
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
