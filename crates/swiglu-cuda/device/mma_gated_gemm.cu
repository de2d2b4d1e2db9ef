// h = act(x·Wg + bg, x·Wu + bu) on every GPU from sm_80: cp.async, ldmatrix and mma.sync.
//
// A block computes a TILE_M × TILE_H tile of h; its WARPS_M × WARPS_H warps each hold the gate and
// the up sums of their part of it, so that the two pre-activations of an output meet in one thread.
// A ring of STAGES tiles, 64 bytes of k wide, hides the latency of memory. The tensor cores see
// every element type with the same bytes: a k-step of 32 bytes is 16 elements of 16 bits or 8 of
// tf32, and `ldmatrix` moves 16-byte rows whatever they hold.
//
// Compile-time: ELEMENT (0 multiplies in tf32: 10 bits of each factor, sums in f32); ORIENTATION,
// BIAS; COPY_BYTES per copy (16, 8, 4, or 2 through registers), the widest that divides every base
// address and row stride; SHARED_BYTES as the host computed them; and what gate.cuh names. M, H and
// K are run-time values; what lies outside is read as zeros.
#include "gated_gemm.cuh"

constexpr int kTileM = TILE_M, kTileH = TILE_H;
constexpr int kWarpsM = WARPS_M, kWarpsH = WARPS_H;
constexpr int kThreads = 32 * kWarpsM * kWarpsH;
constexpr int kStages = STAGES;
constexpr int kWarpRows = kTileM / kWarpsM, kWarpColumns = kTileH / kWarpsH;
constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = kWarpColumns / 8;
static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "a warp's part is whole fragments");

// A stage: x as TILE_M rows of k, each half of the weights as TILE_H rows of k or, [in, out], as
// rows of TILE_H features. 16 bytes between rows spread 8 of them over all banks; unpaired 32-bit
// reads down a column ([in, out] in tf32) need 32.
constexpr int kTileKBytes = 64;
constexpr int kTileK = kTileKBytes / kElementBytes;
constexpr int kXPitch = kTileKBytes + 16;
constexpr int kWeightRows = kInOut ? kTileK : kTileH;
constexpr int kWeightRowBytes = kInOut ? kTileH * kElementBytes : kTileKBytes;
constexpr int kWeightPitch = kWeightRowBytes + (kInOut && kIsF32 ? 32 : 16);
constexpr int kXBytes = kTileM * kXPitch;
constexpr int kHalfBytes = kWeightRows * kWeightPitch;
constexpr int kStageBytes = kXBytes + 2 * kHalfBytes;
static_assert(kStages * kStageBytes == SHARED_BYTES, "the host and the kernel disagree");

struct MmaGatedGemmParams {
  u64 x, gate, up;
  i64 x_stride, weight_stride;
  Extents extents;
  Epilogue epilogue;
};

// Copies ROWS rows of ROW_BYTES bytes of a [rows, columns] matrix, from (row, column) on, to shared
// memory with PITCH bytes from row to row; zeros outside the matrix.
template <int ROWS, int ROW_BYTES, int PITCH>
INLINE void copy_tile(u32 to, u64 matrix, i64 stride, int rows, int columns, int row, int column) {
  constexpr int kCopies = ROW_BYTES / COPY_BYTES;
  static_assert(ROWS * kCopies % kThreads == 0 || ROWS * kCopies < kThreads, "whole rounds");
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * kCopies; i += kThreads) {
    const int r = i / kCopies, c = i % kCopies;
    const int first = column + c * (COPY_BYTES / kElementBytes);
    const int left = row + r < rows ? (columns - first) * kElementBytes : 0;
    const u32 bytes = left < 0 ? 0 : (left < COPY_BYTES ? left : COPY_BYTES);
    const u64 from = matrix + (bytes ? ((row + r) * stride + first) * kElementBytes : 0);
    const u32 at = to + r * PITCH + c * COPY_BYTES;
    if constexpr (COPY_BYTES >= 4) {
      ptx::copy_async<COPY_BYTES>(at, (const void*)from, bytes);
    } else {
      ptx::store_shared(at, bytes ? *(const u16*)from : (u16)0);
    }
  }
}

INLINE void load_stage(const MmaGatedGemmParams& p, u32 stage, Tile tile, int k) {
  const Extents& e = p.extents;
  copy_tile<kTileM, kTileKBytes, kXPitch>(stage, p.x, p.x_stride, e.m, e.k, tile.row, k);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 to = stage + kXBytes + half * kHalfBytes;
    const u64 w = half ? p.up : p.gate;
    if constexpr (kInOut) {
      copy_tile<kWeightRows, kWeightRowBytes, kWeightPitch>(to, w, p.weight_stride, e.k, e.features,
                                                            k, tile.column);
    } else {
      copy_tile<kWeightRows, kWeightRowBytes, kWeightPitch>(to, w, p.weight_stride, e.features, e.k,
                                                            tile.column, k);
    }
  }
}

// Factors as the tensor cores read them.
template <int N>
INLINE void round_factors(u32 (&r)[N]) {
  if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < N; ++i) r[i] = ptx::tf32_bits(ptx::as_float(r[i]));
  }
}

INLINE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kIsF32) {
    ptx::mma_tf32(d, a, b0, b1);
  } else if constexpr (kIsF16) {
    ptx::mma_f16(d, a, b0, b1);
  } else {
    ptx::mma_bf16(d, a, b0, b1);
  }
}

// Weights of 16 features from `column` on at k-step `s` (32 bytes): two fragments of two words.
INLINE void load_weight_fragments(u32 (&b)[4], u32 half, int column, int s) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (!kInOut) {
    const u32 row = column + lane % 8 + lane / 16 * 8;
    ptx::load_matrix_x4(b, half + row * kWeightPitch + s * 32 + lane / 8 % 2 * 16);
  } else if constexpr (!kIsF32) {
    const u32 row = s * 16 + lane % 16;
    ptx::load_matrix_x4_transposed(b, half + row * kWeightPitch + (column + lane / 16 * 8) * 2);
  } else {
    const u32 at = half + (s * 8 + lane % 4) * kWeightPitch + (column + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i] = ptx::load_shared(at + i % 2 * (4 * kWeightPitch) + i / 2 * 32);
    }
  }
  round_factors(b);
}

typedef float Sums[kRowTiles][kColumnTiles][4];

INLINE void multiply_stage(Sums& gate, Sums& up, u32 stage, int warp_row, int warp_column) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kTileKBytes / 32; ++s) {
    u32 x[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const u32 row = warp_row + i * 16 + lane % 16;
      ptx::load_matrix_x4(x[i], stage + row * kXPitch + s * 32 + lane / 16 * 16);
      round_factors(x[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 weights = stage + kXBytes + half * kHalfBytes;
      Sums& sums = half ? up : gate;
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        u32 b[4];
        load_weight_fragments(b, weights, warp_column + j * 8, s);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply_add(sums[i][j], x[i], b[0], b[1]);
          multiply_add(sums[i][j + 1], x[i], b[2], b[3]);
        }
      }
    }
  }
}

KERNEL(kThreads, 1, mma_gated_gemm)(KERNEL_PARAMS(MmaGatedGemmParams) p) {
  const u32 ring = ptx::shared_address(ptx::dynamic_shared());
  const Tile tile = tile_at<kTileM, kTileH>(blockIdx.x, p.extents);
  const int steps = ceiling_divide(p.extents.k, kTileK);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % kWarpsM * kWarpRows, warp_column = warp / kWarpsM * kWarpColumns;

  // One group per stage, also where nothing is left to copy: the count of groups is the clock.
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) load_stage(p, ring + s * kStageBytes, tile, s * kTileK);
    ptx::copy_async_commit();
  }
  Sums gate = {}, up = {};
  for (int step = 0; step < steps; ++step) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
    // The stage that the barrier has just freed.
    const int next = step + kStages - 1;
    if (next < steps) load_stage(p, ring + next % kStages * kStageBytes, tile, next * kTileK);
    ptx::copy_async_commit();
    multiply_stage(gate, up, ring + step % kStages * kStageBytes, warp_row, warp_column);
  }

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0-7 and 8-15 of the fragment
        const int row = tile.row + warp_row + i * 16 + half * 8 + lane / 4;
        const int column = tile.column + warp_column + j * 8 + lane % 4 * 2;
        const int c = 2 * half;
        store_pair(activate_pair(gate[i][j][c], gate[i][j][c + 1], up[i][j][c], up[i][j][c + 1],
                                 p.epilogue, p.extents, row, column),
                   p.epilogue, p.extents, row, column);
      }
    }
  }
}
