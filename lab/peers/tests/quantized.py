"""Quantised blocks as values, written from the format's description and apart from `common/inputs.py`."""

from __future__ import annotations

import numpy as np


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at:at + 2]).view("<f2").astype(np.float64)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """The low nibbles of a run of bytes, then the high ones."""
    return np.concatenate([q & 15, q >> 4], axis=-1).astype(np.float64)


def _pairs_of_six_bits(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of eight sub-blocks from twelve bytes."""
    low, middle, high = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float64), minima.astype(np.float64)


def _q4_k(b: np.ndarray) -> np.ndarray:
    scales, minima = _pairs_of_six_bits(b[:, 4:16])
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    values = (_half(b, 0) * scales)[..., None] * q - (_half(b, 2) * minima)[..., None]
    return values.reshape(-1, 256)


def _q6_k(b: np.ndarray) -> np.ndarray:
    low = b[:, :128].reshape(-1, 2, 2, 32)
    low = np.stack([low[:, :, 0] & 15, low[:, :, 1] & 15, low[:, :, 0] >> 4, low[:, :, 1] >> 4], axis=2)
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    q = (low | ((pairs & 3) << 4)).astype(np.float64).reshape(-1, 16, 16) - 32.0
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float64)
    return ((_half(b, 208) * scales)[..., None] * q).reshape(-1, 256)


DECODERS = {
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:]) - 8.0),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2),
    "Q8_0": lambda b: _half(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float64),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def decode(block: str, blocks: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """[rows, cols] in float64 from one row of bytes per block."""
    return DECODERS[block](blocks).reshape(rows, cols)
