"""The state digest: equal for equal bits, for any layout of the state and any engine.

Two independent sums modulo 2^64 run over all elements, so that parts add up in any order. An element adds key * (bits +
1). Its key is the product of pseudo-random odd numbers. One is for the tensor (name, shape, dtype), and one for each
coordinate of its index in the global tensor. An odd key never hides a change of one element; several changes cancel by
chance about once in 2^64. The digest is computed on the tensor's device, in bounded memory. It does not protect against
deliberate collisions: the bytes of a checkpoint have blake3 for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from blake3 import blake3
from torch import Tensor

from holdfast.checkpoint.box import TensorBox

_MODULUS = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the bits of an element, by its bytes
_TABLE = 1 << 16  # keys kept for each dimension and device: 1 MiB
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 22  # elements that are widened to 64 bits together


@dataclass(frozen=True)
class StateDigest:
    """The digest of a part of the state. Digests of parts that share no element add up to that of the whole."""

    first: int = 0
    second: int = 0

    def __add__(self, other: StateDigest) -> StateDigest:
        return StateDigest((self.first + other.first) % _MODULUS, (self.second + other.second) % _MODULUS)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


def digest_of(boxes: Iterable[TensorBox]) -> StateDigest:
    """The digest of boxes that share no element."""
    return sum(box_digests(list(boxes)), StateDigest())


def scalars_digest(scalars: Mapping[str, float | int]) -> StateDigest:
    """The digest of the scalars, such as the optimizer's step."""
    dtypes = {int: torch.int64, float: torch.float64}
    return digest_of(
        TensorBox.whole(f"scalar {name}", torch.tensor(value, dtype=dtypes[type(value)]))
        for name, value in scalars.items()
    )


def box_digests(boxes: Sequence[TensorBox]) -> list[StateDigest]:
    """The digest of each box. Waits for the device once, at the end."""
    return _finished([_keys_of(box) for box in boxes], _sums(boxes).cpu()) if boxes else []


def begun_digest(boxes: Sequence[TensorBox]) -> Callable[[], StateDigest]:
    """Begin `digest_of` in the current stream of the device, without waiting. Call the returned function once the
    stream has passed this point. It keeps none of the boxes."""
    if not boxes:
        return StateDigest
    keys, sums = [_keys_of(box) for box in boxes], _sums(boxes)
    on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda).copy_(sums, non_blocking=True)
    return lambda: sum(_finished(keys, on_host), StateDigest())


def _sums(boxes: Sequence[TensorBox]) -> Tensor:
    return torch.stack([_contract(_bits(box.data.detach()), box.offset, 0) for box in boxes])


def _finished(keys: Sequence[tuple[int, int]], sums: Tensor) -> list[StateDigest]:
    return [
        StateDigest(*(key * part % _MODULUS for key, part in zip(pair, parts, strict=True)))
        for pair, parts in zip(keys, sums.tolist(), strict=True)
    ]


def _bits(data: Tensor) -> Tensor:
    return data.view(_INTEGERS[data.element_size()])


def _contract(bits: Tensor, offset: tuple[int, ...], dimension: int) -> Tensor:
    """Both sums over a box of bits, whose first axis is `dimension` of the global tensor: int64 [2]."""
    if bits.dim() == 0:
        return _widened(bits).expand(2)
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    row = bits[0].numel() if len(bits) else 0
    if row == 0:
        return total
    chunk = _CPU_CHUNK if bits.device.type == "cpu" else _DEVICE_CHUNK
    rows = max(1, chunk // row)
    for start in range(0, len(bits), rows):
        part, place = bits[start : start + rows], offset[0] + start
        if row > chunk:  # one row is too large for one chunk: one dimension less
            inner = _contract(part[0], offset[1:], dimension + 1)
            total += inner * _keys(bits.device, dimension, place, 1)[:, 0]
        else:
            total += _contract_whole(part, (place, *offset[1:]), dimension)
    return total


def _contract_whole(bits: Tensor, offset: tuple[int, ...], dimension: int) -> Tensor:
    """The same for a box that is small enough: the last axis first, where all the work is."""
    keys = [
        _keys(bits.device, dimension + axis, low, size)
        for axis, (low, size) in enumerate(zip(offset, bits.shape, strict=True))
    ]
    values = _widened(bits)
    if values.device.type == "cpu":  # no accelerator multiplies integer matrices
        flat = values.reshape(-1, values.shape[-1])
        sums = torch.stack([torch.mv(flat, key) for key in keys[-1]]).view(2, *values.shape[:-1])
    else:
        sums = torch.stack([(values * key).sum(-1) for key in keys[-1]])
    for axis in reversed(range(bits.dim() - 1)):
        sums = (sums * keys[axis].view(2, *[1] * axis, -1)).sum(-1)
    return sums


def _widened(bits: Tensor) -> Tensor:
    """bits + 1, so that zeros count. The halves of 64-bit elements are added separately, since their highest bits would
    cancel."""
    if bits.dtype != torch.int64:
        return bits.to(torch.int64).add_(1)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    return low + high * _signed(_mix_int(0x68696768)) + 1


def _keys_of(box: TensorBox) -> tuple[int, int]:
    return tensor_keys(box.name, box.dtype_name, box.global_shape)


@lru_cache(maxsize=1 << 14)
def tensor_keys(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The keys of a tensor for both sums."""
    raw = blake3(f"{name}\0{dtype}\0{list(shape)}".encode()).digest(16)
    return int.from_bytes(raw[:8], "little") | 1, int.from_bytes(raw[8:], "little") | 1


def coordinate_keys(dimension: int, start: int, count: int) -> Tensor:
    """The keys of the coordinates [start, start + count) of one dimension for both sums: int64 [2, count]."""
    return _make_keys(torch.device("cpu"), dimension, start, count)


def _keys(device: torch.device, dimension: int, start: int, count: int) -> Tensor:
    """The keys of the coordinates [start, start + count) of one dimension, for both sums: int64 [2, count]."""
    if start + count <= _TABLE:
        return _table(device, dimension)[:, start : start + count]
    return _make_keys(device, dimension, start, count)


@lru_cache(maxsize=16)
def _table(device: torch.device, dimension: int) -> Tensor:
    return _make_keys(device, dimension, 0, _TABLE)


def _make_keys(device: torch.device, dimension: int, start: int, count: int) -> Tensor:
    """splitmix64 of the coordinate, made odd, with a separate seed for each dimension and each of the two sums."""
    seeds = [_signed(_mix_int(2 * dimension + stream)) for stream in (1, 2)]
    steps = torch.arange(start, start + count, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    keys = torch.stack([steps + seed for seed in seeds])
    keys = (keys ^ _shifted(keys, 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ _shifted(keys, 27)) * _signed(0x94D049BB133111EB)
    return (keys ^ _shifted(keys, 31)) | 1


def _shifted(values: Tensor, places: int) -> Tensor:
    """A right shift that fills with zeros."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _mix_int(number: int) -> int:
    """A pseudo-random odd 64-bit number for each small one."""
    return int.from_bytes(blake3(f"state digest\0{number}".encode()).digest(8), "little") | 1


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - _MODULUS if number >= _MODULUS >> 1 else number
