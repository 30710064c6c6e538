"""Rotary positions: the rotation angles of queries and keys, for the contexts that a model's scaling allows.

The bits are the same on every device. Shape suffixes are those of `decoder`, except that K is half a head's width for
frequencies.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.spec.model import RopeScaling


def rotary_tables(positions: int, width: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [positions, width] each, fp32.

    They are computed on the CPU for every device, so that all devices rotate by the same bits. Formula: RoFormer,
    equation 34, with the halves in the layout of Llama's published weights.
    """
    with torch.device("cpu"):
        frequency_K = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        if scaling.kind == "linear":
            frequency_K = frequency_K / scaling.factor
        elif scaling.kind == "llama3":
            frequency_K = _as_llama3(frequency_K, scaling)
        angle_TK = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_K).repeat(1, 2)
        return angle_TK.cos(), angle_TK.sin()


def _as_llama3(frequency_K: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1 scaling: long waves are slowed down by the factor, and short ones are unchanged. Between the two
    bounds the share of slowdown is linear in the frequency. The order of operations is that of `transformers`, for
    the same bits."""
    low, high, context = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context
    wave_K = 2 * math.pi / frequency_K
    share_K = (context / wave_K - low) / (high - low)
    between_K = (1 - share_K) * frequency_K / scaling.factor + share_K * frequency_K
    scaled_K = torch.where(wave_K > context / low, frequency_K / scaling.factor, frequency_K)
    return torch.where((wave_K >= context / high) & (wave_K <= context / low), between_K, scaled_K)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate every pair (k, k + K/2) of a head by the angle of its position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
