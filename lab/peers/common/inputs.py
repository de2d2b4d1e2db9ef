"""Seeded inputs, bit for bit those of `swiglu_core::random`, in numpy.

`bits` is SplitMix64's finaliser over `seed + (index + 1) * PHI`; a normal value is the centred and
scaled sum of its four 16-bit quarters. All of it is integer arithmetic until one multiplication in
float32, so every language has the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import numpy as np

PHI = 0x9E37_79B9_7F4A_7C15
MIX_1 = 0xBF58_476D_1CE4_E5B9
MIX_2 = 0x94D0_49BB_1331_11EB
MASK = (1 << 64) - 1

# What the streams of a case's tensors differ in from the case's seed.
X, GATE, UP, DOWN, OUT_GRAD = 0x78, 0x67, 0x75, 0x64, 0x6F
ACTIVATION_SCALE = np.float32(2.0)

#: 1 / sqrt of the variance of the sum of four quarters, as the f32 constant of the definition.
UNIT = np.float32(1.0) / np.float32(37_837.227)
CENTRE = np.float32(131_070.0)

#: Elements derived at a time: the temporaries stay in cache.
CHUNK = 1 << 16


def weight_scale(inputs: int) -> np.float32:
    """Pre-activations of normal inputs are then normal."""
    return np.float32(1.0) / np.sqrt(np.float32(max(inputs, 1)))


def bits(seed: int, first: int, count: int) -> np.ndarray:
    """Values `first .. first + count` of stream `seed`."""
    with np.errstate(over="ignore"):
        z = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(PHI)
        z += np.uint64(seed & MASK)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        return z ^ (z >> np.uint64(31))


def normal(seed: int, first: int, count: int) -> np.ndarray:
    """Standard normal values in float32."""
    b = bits(seed, first, count)
    quarter = np.uint64(0xFFFF)
    total = (b & quarter) + ((b >> np.uint64(16)) & quarter)
    total += ((b >> np.uint64(32)) & quarter) + (b >> np.uint64(48))
    return (total.astype(np.float32) - CENTRE) * UNIT


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, size):
        yield first, min(size, total - first)


def normal_matrix(seed: int, rows: int, cols: int, scale: np.float32) -> np.ndarray:
    """[rows, cols] of `scale * normal`, float32, not yet rounded to the case's dtype."""
    out = np.empty(rows * cols, dtype=np.float32)
    for first, count in chunks(out.size, CHUNK):
        np.multiply(normal(seed, first, count), scale, out=out[first:first + count])
    return out.reshape(rows, cols)


@dataclass(frozen=True)
class Block:
    """A type of quantised weights: elements and bytes of a block, where its f16 scale lies, and the
    scale and the minimum (relative to it) at which blocks of random bytes have deviation 1 and mean 0."""

    elements: int
    size: int
    scale_at: int
    unit: float
    minimum: float | None = None


#: By name; the numbers are those of `swiglu_core::random::quantized_matrix`.
BLOCKS = {
    "Q4_0": Block(32, 18, 0, 4.6),
    "Q4_1": Block(32, 20, 0, 4.6, -7.5),
    "Q5_0": Block(32, 22, 0, 9.2),
    "Q5_1": Block(32, 24, 0, 9.2, -15.5),
    "Q8_0": Block(32, 34, 0, 74.0),
    "Q4_K": Block(256, 144, 0, 256.0, 7.5),
    "Q5_K": Block(256, 176, 0, 512.0, 15.5),
    "Q6_K": Block(256, 210, 208, 1368.0),
}
#: What the stream of scales differs in from that of the bytes.
SCALES = 0x73


def quantized_matrix(seed: int, block: str, rows: int, cols: int, deviation: np.float32) -> np.ndarray:
    """The bytes of a [rows, cols] matrix of random blocks, one row of the result per block."""
    b = BLOCKS[block]
    count = rows * (cols // b.elements)
    words = -(-count * b.size // 8)
    data = np.empty(words, dtype="<u8")
    for first, number in chunks(words, CHUNK):
        data[first:first + number] = bits(seed, first, number)
    out = data.view(np.uint8)[:count * b.size].reshape(count, b.size)
    for first, number in chunks(count, CHUNK):
        low = (bits(seed ^ SCALES, first, number) & np.uint64(0xFFFF)).astype(np.float32)
        unit = np.float32(1.0) / np.float32(b.unit)
        d = deviation * unit * (np.float32(0.75) + low * np.float32(0.5 / 65536.0))
        fields = [d] if b.minimum is None else [d, d * np.float32(b.minimum)]
        for at, values in enumerate(fields, start=b.scale_at // 2):
            halves = values.astype("<f2").view(np.uint8).reshape(number, 2)
            out[first:first + number, 2 * at:2 * at + 2] = halves
    return out


def round_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> the 16 bits of bfloat16, to nearest, ties to even; for finite values."""
    word = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
            >> np.uint32(16)).astype(np.uint16)


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to `f32`, `f16`, or `bf16` as 16-bit words."""
    match dtype:
        case "f32":
            return values
        case "f16":
            return values.astype(np.float16)
        case "bf16":
            return round_bf16(values)
        case _:
            raise ValueError(f"dtype {dtype}; known are f32, f16, bf16")
