"""The kernels: element-wise, packed, the dual GEMM, and the sequential block as a warning.

Everything is computed in float32 from what was loaded, and rounded once where it is stored. Weights
are [out, in] memory, or any strides.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl

#: Triton's own switch: kernels are interpreted on the CPU, to test them without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def tuned(configurations: list[triton.Config], key: list[str]):
    """Tries the configurations once per shape; the first one alone where kernels are interpreted."""
    return triton.autotune(configurations[:1] if INTERPRETED else configurations, key=key)


_ELEMENTWISE = [triton.Config({"BLOCK": block}, num_warps=warps)
                for block, warps in ((1024, 4), (2048, 8), (4096, 8), (8192, 16), (2048, 4))]


@tuned(_ELEMENTWISE, key=["count"])
@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@tuned(_ELEMENTWISE, key=["half"])
@triton.jit
def _packed_swiglu(packed, out, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    first = packed + row * 2 * half + at
    g = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    h = (g * tl.sigmoid(g) * u).to(out.dtype.element_ty)
    tl.store(out + row * half + at, h, mask=inside)


@triton.jit
def _gradients(d, g, u):
    """Of gate and up, in float32."""
    sigmoid = tl.sigmoid(g)
    return d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), d * g * sigmoid


@tuned(_ELEMENTWISE, key=["count"])
@triton.jit
def _swiglu_backward(d_out, gate, up, d_gate, d_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = _gradients(d, g, u)
    tl.store(d_gate + at, of_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, of_up.to(d_up.dtype.element_ty), mask=inside)


@tuned(_ELEMENTWISE, key=["half"])
@triton.jit
def _packed_swiglu_backward(d_out, packed, grads, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < half
    first = row * 2 * half + at
    d = tl.load(d_out + row * half + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(packed + first, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(packed + first + half, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = _gradients(d, g, u)
    tl.store(grads + first, of_gate.to(grads.dtype.element_ty), mask=inside)
    tl.store(grads + first + half, of_up.to(grads.dtype.element_ty), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) * up of contiguous tensors of one shape."""
    count = out.numel()
    _swiglu[lambda meta: (triton.cdiv(count, meta["BLOCK"]), )](gate, up, out, count)
    return out


def packed_swiglu(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `swiglu`, of [m, 2 * half] with the gate first."""
    m, half = out.shape
    _packed_swiglu[lambda meta: (m, triton.cdiv(half, meta["BLOCK"]))](packed, out, half)
    return out


def swiglu_backward(d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, d_gate: torch.Tensor,
                    d_up: torch.Tensor) -> None:
    """The gradients of gate and up from that of the result, of contiguous tensors of one shape."""
    count = d_out.numel()
    grid = lambda meta: (triton.cdiv(count, meta["BLOCK"]), )
    _swiglu_backward[grid](d_out, gate, up, d_gate, d_up, count)


def packed_swiglu_backward(d_out: torch.Tensor, packed: torch.Tensor, grads: torch.Tensor) -> None:
    """As `swiglu_backward`, of [m, 2 * half] with the gate first, into gradients that lie alike."""
    m, half = d_out.shape
    grid = lambda meta: (m, triton.cdiv(half, meta["BLOCK"]))
    _packed_swiglu_backward[grid](d_out, packed, grads, half)


def _dual(bm: int, bn: int, bk: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)


# Two accumulators of BM x BN: tiles are half as wide as those of a plain GEMM. The narrow ones are for
# few tokens, where loading weights is all there is to do.
_DUAL = [_dual(*c) for c in (
    (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 64, 4, 4), (16, 128, 128, 8, 3),
    (32, 64, 128, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 8, 3),
    (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
    (256, 64, 64, 8, 4),
)]


@triton.jit
def _dual_tile(x, wg, wu, out, M, N, K, stride_n, stride_k,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # Blocks that share weights run together: groups of eight row blocks.
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (8 * blocks_n)
    rows = tl.minimum(blocks_m - group * 8, 8)
    block_m = group * 8 + (pid % (8 * blocks_n)) % rows
    block_n = (pid % (8 * blocks_n)) // rows

    m = block_m * BM + tl.arange(0, BM)
    n = block_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :]
    w_at = n[None, :].to(tl.int64) * stride_n + k[:, None].to(tl.int64) * stride_k
    g_at, u_at = wg + w_at, wu + w_at
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        left = K - first
        a = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        inside = (n[None, :] < N) & (k[:, None] < left)
        gate = tl.dot(a, tl.load(g_at, mask=inside, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(u_at, mask=inside, other=0.0), up, input_precision="ieee")
        x_at += BK
        g_at += BK * stride_k
        u_at += BK * stride_k
    h = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], h, mask=(m[:, None] < M) & (n[None, :] < N))


@tuned(_DUAL, key=["M", "N", "K"])
@triton.jit
def _dual_gemm(x, wg, wu, out, M, N, K, stride_n, stride_k,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    _dual_tile(x, wg, wu, out, M, N, K, stride_n, stride_k, BM, BN, BK)


# The same by mma.sync, which wants other tiles and shorter steps: it reads its factors from registers.
_DUAL_MMA_SYNC = [_dual(*c) for c in (
    (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (32, 64, 64, 4, 4), (32, 32, 128, 4, 4),
    (64, 32, 64, 4, 4), (64, 64, 32, 4, 4), (64, 64, 64, 4, 3), (64, 128, 32, 4, 3), (64, 128, 32, 8, 3),
    (128, 32, 64, 4, 4), (128, 64, 32, 4, 3), (128, 64, 32, 4, 4), (128, 64, 32, 8, 4), (128, 64, 64, 8, 3),
    (128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (256, 64, 32, 8, 3),
)]


@tuned(_DUAL_MMA_SYNC, key=["M", "N", "K"])
@triton.jit
def _dual_gemm_mma_sync(x, wg, wu, out, M, N, K, stride_n, stride_k,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    _dual_tile(x, wg, wu, out, M, N, K, stride_n, stride_k, BM, BN, BK)


@contextlib.contextmanager
def _as_for_sm80():
    """Kernels compiled within are optimised as for sm_80, with cp.async and mma.sync, and assembled for the device that
    there is. Triton offers no switch for it, so its compiler's function is wrapped."""
    if INTERPRETED:
        yield
        return
    from triton.backends.nvidia.compiler import CUDABackend

    original = CUDABackend.make_ttgir

    def make_ttgir(mod, metadata, options, _capability):
        return original(mod, metadata, options, 80)

    CUDABackend.make_ttgir = staticmethod(make_ttgir)
    try:
        yield
    finally:
        CUDABackend.make_ttgir = staticmethod(original)


def _launch_dual(kernel, x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    (m, k), n = x.shape, out.shape[1]
    grid = lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]), )
    kernel[grid](x, wg, wu, out, m, n, k, wg.stride(0), wg.stride(1))
    return out


def dual_gemm(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = silu(x wg^T) * (x wu^T): x [m, k] and out contiguous, both weights [n, k] alike in memory."""
    return _launch_dual(_dual_gemm, x, wg, wu, out)


def dual_gemm_mma_sync(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `dual_gemm`, with the instructions of sm_80."""
    with _as_for_sm80():
        return _launch_dual(_dual_gemm_mma_sync, x, wg, wu, out)


@triton.jit
def _sequential_mlp(x, wg, wu, wd, sums, out, M, H, K,
                    BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr):
    # One block does all of the work for its rows, one step after the other.
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    h, k = tl.arange(0, BH), tl.arange(0, BK)
    rows = m[:, None] < M
    for first_h in range(0, H, BH):
        gate = tl.zeros((BM, BH), tl.float32)
        up = tl.zeros((BM, BH), tl.float32)
        hh = first_h + h
        for first_k in range(0, K, BK):
            kk = first_k + k
            a = tl.load(x + m[:, None] * K + kk[None, :], mask=rows & (kk[None, :] < K), other=0.0)
            at = hh[None, :].to(tl.int64) * K + kk[:, None]
            inside = (hh[None, :] < H) & (kk[:, None] < K)
            gate = tl.dot(a, tl.load(wg + at, mask=inside, other=0.0), gate, input_precision="ieee")
            up = tl.dot(a, tl.load(wu + at, mask=inside, other=0.0), up, input_precision="ieee")
        hidden = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
        # Sums of the result pass through memory: too many for registers. Each thread reads back what
        # it wrote itself, since load and store have one layout.
        for first_k in range(0, K, BK):
            kk = first_k + k
            at = kk[None, :].to(tl.int64) * H + hh[:, None]
            w = tl.load(wd + at, mask=(kk[None, :] < K) & (hh[:, None] < H), other=0.0)
            y_at, inside = sums + m[:, None] * K + kk[None, :], rows & (kk[None, :] < K)
            y = tl.load(y_at, mask=inside & (first_h > 0), other=0.0)
            y = tl.dot(hidden, w, y, input_precision="ieee")
            tl.store(y_at, y, mask=inside)
            if first_h + BH >= H:
                tl.store(out + m[:, None] * K + kk[None, :], y.to(out.dtype.element_ty), mask=inside)


def sequential_mlp(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor, wd: torch.Tensor,
                   sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The whole block in one kernel, the wrong way: one thread block per 16 tokens, which loops over the
    whole of both reductions. Fused, one launch, nothing between in memory but float32 sums, and all
    other multiprocessors idle."""
    (m, k), h = x.shape, wg.shape[0]
    _sequential_mlp[(triton.cdiv(m, 16), )](x, wg, wu, wd, sums, out, m, h, k, BM=16, BH=64, BK=64,
                                            num_warps=4)
    return out
