"""Triton kernels for weights of 8 and 4 bits, as a user of Triton would write them for few tokens.

Weights are decoded to the dtype of x, group by group, and multiplied by `tl.dot`, whose rows are padded to 16 tokens; a
single token is a sum of products instead. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ways.kernels import tuned

from .data import GROUP, Quantized


def _configurations(tiles: tuple[tuple[int, int, int, int], ...]) -> list[triton.Config]:
    return [triton.Config({"BN": bn, "BG": bg}, num_warps=warps, num_stages=stages)
            for bn, bg, warps, stages in tiles]


# Features of a tile, groups of 32 of a step, warps, stages.
_TILES = _configurations((
    (16, 4, 2, 4), (16, 8, 4, 4), (16, 16, 4, 3), (32, 4, 4, 4), (32, 8, 4, 3), (32, 8, 4, 5), (32, 16, 8, 3),
    (64, 2, 4, 5), (64, 4, 4, 4), (64, 4, 8, 4), (64, 8, 8, 3), (128, 2, 8, 4), (128, 4, 8, 3),
))
# One token: rows of weights are summed by a few warps each.
_ROWS = _configurations((
    (4, 16, 4, 2), (4, 32, 4, 2), (8, 16, 4, 2), (8, 16, 4, 4), (8, 32, 8, 2), (16, 8, 4, 3), (16, 16, 8, 2),
    (16, 16, 4, 4), (32, 8, 8, 3), (2, 64, 4, 2), (1, 128, 4, 2), (2, 32, 2, 3),
))


@triton.jit
def _decoded(values, scales, n, group, left, G, NIBBLES: tl.constexpr, HIGH: tl.constexpr, BN: tl.constexpr,
             BG: tl.constexpr, dtype: tl.constexpr):
    """Half of the elements of some groups, [BN, BG * 16]: the first 16 of each, or the last."""
    j = tl.arange(0, BG * 16)
    inside = (j // 16 < left)[None, :]
    if NIBBLES:
        at = n[:, None].to(tl.int64) * G * 16 + group * 16 + j[None, :]
        pairs = tl.load(values + at, mask=inside, other=0)
        q = ((pairs >> 4) if HIGH else (pairs & 15)).to(tl.int8) - 8
    else:
        k = j // 16 * 32 + j % 16 + (16 if HIGH else 0)
        q = tl.load(values + n[:, None].to(tl.int64) * G * 32 + group * 32 + k[None, :], mask=inside, other=0)
    g = tl.arange(0, BG)
    s = tl.load(scales + n[:, None].to(tl.int64) * G + group + g[None, :], mask=(g < left)[None, :], other=0.0)
    s = tl.broadcast_to(s[:, :, None], (BN, BG, 16))
    w = tl.reshape(q.to(tl.float32), (BN, BG, 16)) * s.to(tl.float32)
    return tl.reshape(w, (BN, BG * 16)).to(dtype)


@triton.jit
def _halves(x, m, M, K, group, left, HIGH: tl.constexpr, BG: tl.constexpr):
    """The elements of x that meet them, [16, BG * 16]."""
    j = tl.arange(0, BG * 16)
    k = group * 32 + j // 16 * 32 + j % 16 + (16 if HIGH else 0)
    inside = (m[:, None] < M) & (j // 16 < left)[None, :]
    return tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def _products(sums, x, values, scales, m, n, M, K, group, left, NIBBLES: tl.constexpr, ONE: tl.constexpr,
              BN: tl.constexpr, BG: tl.constexpr):
    for high in tl.static_range(2):
        w = _decoded(values, scales, n, group, left, K // 32, NIBBLES, high, BN, BG, x.dtype.element_ty)
        a = _halves(x, m, M, K, group, left, high, BG)
        if ONE:
            sums += tl.sum(w.to(tl.float32) * a.to(tl.float32), 1)[None, :]
        else:
            sums = tl.dot(a, tl.trans(w), sums)
    return sums


@triton.jit
def _gated_tile(x, gq, gs, uq, us, out, M, N, K, NIBBLES: tl.constexpr, ONE: tl.constexpr, BN: tl.constexpr,
                BG: tl.constexpr):
    BM: tl.constexpr = 1 if ONE else 16
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for group in range(0, K // 32, BG):
        left = K // 32 - group
        gate = _products(gate, x, gq, gs, m, row, M, K, group, left, NIBBLES, ONE, BN, BG)
        up = _products(up, x, uq, us, m, row, M, K, group, left, NIBBLES, ONE, BN, BG)
    h = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], h, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _plain_tile(x, q, s, out, M, N, K, NIBBLES: tl.constexpr, ONE: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    BM: tl.constexpr = 1 if ONE else 16
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    sums = tl.zeros((BM, BN), tl.float32)
    for group in range(0, K // 32, BG):
        sums = _products(sums, x, q, s, m, row, M, K, group, K // 32 - group, NIBBLES, ONE, BN, BG)
    y = sums.to(out.dtype.element_ty)
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


_KEY = ["M", "N", "K", "NIBBLES"]


@tuned(_TILES, key=_KEY)
@triton.jit
def _gated(x, gq, gs, uq, us, out, M, N, K, NIBBLES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    _gated_tile(x, gq, gs, uq, us, out, M, N, K, NIBBLES, False, BN, BG)


@tuned(_ROWS, key=_KEY)
@triton.jit
def _gated_of_one(x, gq, gs, uq, us, out, M, N, K, NIBBLES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    _gated_tile(x, gq, gs, uq, us, out, M, N, K, NIBBLES, True, BN, BG)


@tuned(_TILES, key=_KEY)
@triton.jit
def _plain(x, q, s, out, M, N, K, NIBBLES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    _plain_tile(x, q, s, out, M, N, K, NIBBLES, False, BN, BG)


@tuned(_ROWS, key=_KEY)
@triton.jit
def _plain_of_one(x, q, s, out, M, N, K, NIBBLES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    _plain_tile(x, q, s, out, M, N, K, NIBBLES, True, BN, BG)


#: Tokens of a tile.
MOST_TOKENS = 16


def _grid(n: int):
    return lambda meta: (triton.cdiv(n, meta["BN"]), )


def gated(x: torch.Tensor, gate: Quantized, up: Quantized, out: torch.Tensor) -> torch.Tensor:
    """out = silu(x gate^T) * (x up^T) of up to 16 tokens, x [m, k] and out [m, n] contiguous."""
    (m, k), n = x.shape, out.shape[1]
    assert m <= MOST_TOKENS and k % GROUP == 0
    kernel = _gated_of_one if m == 1 else _gated
    kernel[_grid(n)](x, gate.values, gate.scales, up.values, up.scales, out, m, n, k, gate.nibbles)
    return out


def plain(x: torch.Tensor, weight: Quantized, out: torch.Tensor) -> torch.Tensor:
    """out = x weight^T, as `gated`."""
    (m, k), n = x.shape, out.shape[1]
    assert m <= MOST_TOKENS and k % GROUP == 0
    kernel = _plain_of_one if m == 1 else _plain
    kernel[_grid(n)](x, weight.values, weight.scales, out, m, n, k, weight.nibbles)
    return out
