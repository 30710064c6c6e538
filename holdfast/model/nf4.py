"""NF4 (QLoRA; Dettmers et al. 2023): matrices in 4 bits an element, with a scale for each 64 elements of a row.

Promises the layout that bitsandbytes publishes: the codes of its table `nf4`, the first of two elements in the high
half of a byte, and the largest magnitude of each block in fp32. Everything is a division, a comparison with the middles
between codes, and a table lookup, so the same matrix gives the same bytes on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 64  # elements with one scale
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BYTES = 0.5 + 4 / BLOCK  # of one element, with its share of the scale


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The packed codes [rows, columns / 2], uint8, and the scales [rows, columns / BLOCK], fp32, of a matrix whose
    columns are a multiple of BLOCK."""
    blocks = matrix.float().unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(-1)
    codes = torch.tensor(CODES, device=matrix.device)
    scaled = blocks / torch.where(scale > 0, scale, 1.0)[..., None]
    index = torch.bucketize(scaled, (codes[1:] + codes[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
    return index[:, 0::2] << 4 | index[:, 1::2], scale


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix that `quantise` stored, rounded to `dtype`."""
    codes = torch.tensor(CODES, device=packed.device)
    values = codes[torch.stack((packed >> 4, packed & 15), -1).flatten(1).int()]
    values.view(*scale.shape, BLOCK).mul_(scale[..., None])
    return values.to(dtype)


def expand(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A frozen matrix in `dtype`: of its codes and scales, or of one tensor."""
    return stored[0].to(dtype) if len(stored) == 1 else dequantise(stored[0], stored[1], dtype)
