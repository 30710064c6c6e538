"""The codec restores every bit and refuses data that it did not encode."""

import numpy as np
import pytest

from holdfast.checkpoint.codec import _NUMBERS, Codec, choose, decode_into, encode
from holdfast.spec.errors import DataError

DTYPES = sorted(_NUMBERS)


def weights(seed: int, count: int = 20_000, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=count) * scale).astype(np.float32)


def decoded(stored: bytes, codec: Codec, dtype: str, size: int, base: bytes | None = None) -> bytes:
    target = bytearray(size)
    decode_into(stored, codec, dtype, memoryview(target), base)
    return bytes(target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_base", [False, True], ids=["alone", "differences"])
def test_any_bits_of_any_dtype_round_trip(dtype: str, with_base: bool) -> None:
    noise = np.random.default_rng(7)
    for count in (0, 1, 3, 257, 70_000):  # random bits include all kinds of NaN, both zeros, both infinities
        data = noise.bytes(count * _NUMBERS[dtype].itemsize)
        base = noise.bytes(len(data)) if with_base else None
        codec = Codec.DIFFERENCES if with_base else Codec.NUMBERS
        assert decoded(encode(data, dtype, base), codec, dtype, len(data), base) == data


def test_the_codec_predicts_the_decay_of_second_moments() -> None:
    before = np.square(weights(1, scale=1e-3))
    now = (before * np.float32(0.95) + np.float32(0.05) * np.square(weights(2, scale=1e-3))).astype(np.float32)
    choice = choose(now.tobytes(), "float32", before.tobytes())
    assert choice.codec == Codec.DIFFERENCES
    assert 0.95 <= choice.scale < 0.96
    encoded = encode(now.tobytes(), "float32", before.tobytes(), choice.scale)
    assert len(encoded) < len(encode(now.tobytes(), "float32", before.tobytes()))
    assert decoded(encoded, Codec.DIFFERENCES, "float32", now.nbytes, before.tobytes()) == now.tobytes()


def test_special_floats_keep_their_payload() -> None:
    bits = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF, 1], np.uint32).tobytes()
    assert decoded(encode(bits, "float32"), Codec.NUMBERS, "float32", len(bits)) == bits


def test_the_codec_is_chosen_by_measurement() -> None:
    before = weights(1)
    after = (before * np.float32(1 - 1e-5) + weights(2, scale=1e-5)).tobytes()
    assert choose(after, "float32", before.tobytes()) == (Codec.DIFFERENCES, 1.0)
    # A base from another tensor: nothing to gain.
    assert choose(after, "float32", weights(3).tobytes()).codec == Codec.NUMBERS
    assert choose(after, "float32").codec == Codec.NUMBERS
    assert choose(np.random.default_rng(4).bytes(80_000), "float32").codec == Codec.RAW
    assert choose(b"", "float32").codec == Codec.RAW
    assert choose(bytes(80_000), "uint8").codec == Codec.RAW  # not a number type
    assert len(encode(after, "float32", before.tobytes())) < 0.8 * len(encode(after, "float32"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: stored[:-1],
        lambda stored: stored[: len(stored) // 2],
        lambda stored: b"",
        lambda stored: b"\0" + stored[1:],
        lambda stored: encode(weights(5, 19_999).tobytes(), "float32"),
        lambda stored: encode(weights(5, 20_001).tobytes(), "float32"),
        lambda stored: encode(weights(5, 20_000).tobytes(), "int32"),
    ],
    ids=["short", "half", "nothing", "other", "too few", "too many", "another type"],
)
def test_damaged_encoded_bytes_are_refused(damage: object) -> None:
    assert callable(damage)
    encoded = damage(encode(weights(1).tobytes(), "float32"))
    with pytest.raises(DataError):
        decoded(encoded, Codec.NUMBERS, "float32", 80_000)


def test_differences_require_a_base_and_raw_bytes_their_exact_length() -> None:
    data = weights(1).tobytes()
    with pytest.raises(DataError, match="without a base"):
        decoded(encode(data, "float32", data), Codec.DIFFERENCES, "float32", len(data))
    with pytest.raises(DataError, match="with a base"):
        decoded(encode(data, "float32"), Codec.NUMBERS, "float32", len(data), data)
    with pytest.raises(DataError, match="are stored for"):
        decoded(data[:-1], Codec.RAW, "float32", len(data))
    with pytest.raises(DataError, match="uint8 cannot"):
        decoded(data, Codec.NUMBERS, "uint8", len(data))
    assert decoded(data, Codec.RAW, "uint8", len(data)) == data
