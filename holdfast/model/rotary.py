"""Rotary positions: the rotation angles of queries and keys, for the contexts that a model's scaling allows.

The bits are the same on every device. Shape suffixes are those of `decoder`, except that K is half a head's width for
frequencies.
"""

import math

import torch
from torch import Tensor

from holdfast.spec.model import RopeScaling

# ruff: noqa: N803, N806 - shape suffixes are upper case


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
        elif scaling.kind == "yarn":
            frequency_K = _as_yarn(width, theta, scaling)
        elif scaling.kind == "longrope":
            factors = scaling.long_factors if positions > scaling.original_context else scaling.short_factors
            power_K = torch.arange(0, width, 2, dtype=torch.int64).float() / width
            frequency_K = 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**power_K)
        angle_TK = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_K).repeat(1, 2)
        cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
        if scaling.kind in ("yarn", "longrope"):
            factor = attention_factor(scaling)
            cos_TK, sin_TK = cos_TK * factor, sin_TK * factor
        return cos_TK, sin_TK


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: YaRN (Peng et al. 2023, equation 22) and LongRoPE (Ding et al. 2024)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))


def _as_yarn(width: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN: frequencies with few rotations in the original context are divided by the factor, those with many are
    unchanged, and the share grows linearly between. The order of operations is that of `transformers`."""

    def place(rotations: float) -> float:
        return width * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    wave_K = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    ramp_K = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept_K = 1 - ramp_K.clamp(0, 1)
    return 1.0 / (scaling.factor * wave_K) * (1 - kept_K) + 1.0 / wave_K * kept_K


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
    """Rotate every pair (k, k + K/2) of a head by the angle of its position. Tables of a smaller width rotate only the
    first part of a head."""
    if cos_TK.shape[-1] < x_BHTK.shape[-1]:
        rotated, rest = x_BHTK.split((cos_TK.shape[-1], x_BHTK.shape[-1] - cos_TK.shape[-1]), dim=-1)
        return torch.cat((rotate(rotated, cos_TK, sin_TK), rest), dim=-1)
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
