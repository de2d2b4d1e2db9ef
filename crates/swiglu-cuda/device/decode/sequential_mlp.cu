// A warning, not a way: y = act(x·Wg + bg, x·Wu + bu)·Wd + bd in one launch of one thread block.
//
// It is fused, it launches once, it reads every weight once, and h stays in the first-level cache: all
// that is said in favour of a fused block. Its one thread block walks through the whole of both
// reductions while every other SM is idle. One SM takes in 64 bytes per cycle
// at the very most, 110 GB/s of 4.3 TB/s: predicted, to be measured, at least 40 times the time of
// decode_mlp.cu on an H200. No plan chooses it; measurements can.
//
// Compile-time: ELEMENT, TOKENS, WARPS and what gate.cuh names. Rows of x are whole 16 bytes.
#include "decode/decode_mlp.cuh"

constexpr int kTokens = TOKENS, kWarps = WARPS, kThreads = 32 * kWarps;

typedef float Sums[kTokens];

// The products of a row of weights with every token, by a warp; all of its lanes get the sums.
INLINE void multiply_row(Sums& sums, u64 row, u64 tokens, i64 stride, int m, int k) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) sums[t] = 0.0f;
  for (int at = threadIdx.x % 32 * 16; at < k * kElementBytes; at += 32 * 16) {
    const Values<16> w = unpack(ptx::load_global((const ptx::Raw<16>*)(row + at)));
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= m) break;
      const u64 from = tokens + t * stride * kElementBytes + at;
      const Values<16> x = unpack(ptx::load_global((const ptx::Raw<16>*)from));
#pragma unroll
      for (int i = 0; i < w.kCount; ++i) sums[t] = __fmaf_rn(w.value[i], x.value[i], sums[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      sums[t] = __fadd_rn(sums[t], __shfl_xor_sync(0xFFFFFFFFu, sums[t], lanes));
    }
  }
}

KERNEL(kThreads, 1, sequential_mlp)(KERNEL_PARAMS(DecodeMlpParams) p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < p.h_stride; i += kWarps) {
    // What lies behind a row of h meets weights that are zero.
    Sums gate = {}, up = {};
    if (i < p.features) {
      multiply_row(gate, p.gate + i * p.gate_stride, p.x, p.x_stride, p.m, p.k);
      multiply_row(up, p.up + i * p.gate_stride, p.x, p.x_stride, p.m, p.k);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      Element* h = (Element*)p.h + t * p.h_stride + i;
      if (t < p.m && lane == t) *h = i < p.features ? activated(p, i, gate[t], up[t]) : (Element)0;
    }
  }
  __syncthreads();
  for (int i = warp; i < p.k; i += kWarps) {
    Sums sums;
    multiply_row(sums, p.down + i * p.down_stride, p.h, p.h_stride, p.m, p.features);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < p.m && lane == t) store_output(p, t, i, sums[t]);
    }
  }
}
