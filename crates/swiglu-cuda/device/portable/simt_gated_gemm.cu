// h = act(x·Wg + bg, x·Wu + bu) in f32, with exact products: no tensor core multiplies f32.
//
// A block of 256 threads computes 128 × 64 outputs; a thread 8 × 4 of them, gate and up, so that 64
// fused multiply-adds follow four 16-byte reads of shared memory. Tiles lie with k outermost: x and
// the weights are transposed on their way in by 4-byte asynchronous copies, which also means that
// any stride and alignment of f32 will do. SHARED_BYTES, STAGES, ORIENTATION and BIAS as elsewhere.
//
// Floor: 4·M·H·K FLOP at 128 lanes · 2 FLOP per cycle and SM.
#include "lib/gated_gemm.cuh"
static_assert(kIsF32, "the other types have tensor cores");

constexpr int kTileM = 128, kTileH = 64, kTileK = 16;
constexpr int kThreads = 256;
constexpr int kStages = STAGES;
constexpr int kThreadRows = 8, kThreadColumns = 4;
// Floats from one k to the next: 16-byte aligned, and not a multiple of the 32 banks.
constexpr int kXPitch = kTileM + 4, kWeightPitch = kTileH + 4;
constexpr int kXFloats = kTileK * kXPitch, kHalfFloats = kTileK * kWeightPitch;
constexpr int kStageFloats = kXFloats + 2 * kHalfFloats;
static_assert(kStages * kStageFloats * 4 == SHARED_BYTES, "the host and the kernel disagree");

struct SimtGatedGemmParams {
  u64 x, gate, up;
  i64 x_stride, weight_stride;
  Extents extents;
  EpilogueParams epilogue;
};

// Copies EXTENT × kTileK values with k outermost in shared memory. In memory k is the column
// (K_IS_COLUMN) or the row; `outer` and `k` are the first of each; zeros outside.
template <int EXTENT, int PITCH, bool K_IS_COLUMN>
INLINE void copy_transposed(u32 to, u64 matrix, i64 stride, int extent, int k_extent, int outer,
                            int k) {
#pragma unroll
  for (int i = threadIdx.x; i < EXTENT * kTileK; i += kThreads) {
    const int o = K_IS_COLUMN ? i / kTileK : i % EXTENT;
    const int c = K_IS_COLUMN ? i % kTileK : i / EXTENT;
    const bool inside = outer + o < extent && k + c < k_extent;
    const i64 row = K_IS_COLUMN ? outer + o : k + c, column = K_IS_COLUMN ? k + c : outer + o;
    const u64 from = matrix + (inside ? (row * stride + column) * 4 : 0);
    ptx::copy_async<4>(to + (c * PITCH + o) * 4, (const void*)from, inside);
  }
}

INLINE void load_stage(const SimtGatedGemmParams& p, u32 stage, Tile tile, int k) {
  const Extents& e = p.extents;
  copy_transposed<kTileM, kXPitch, true>(stage, p.x, p.x_stride, e.m, e.k, tile.row, k);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_transposed<kTileH, kWeightPitch, !kInOut>(stage + (kXFloats + half * kHalfFloats) * 4,
                                                   half ? p.up : p.gate, p.weight_stride,
                                                   e.features, e.k, tile.column, k);
  }
}

// N adjacent floats of shared memory.
template <int N>
INLINE void read(float (&v)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const ptx::Raw<16> raw = *(const ptx::Raw<16>*)(from + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[i + j] = ptx::as_float(raw.word[j]);
  }
}

typedef float Sums[kThreadRows][kThreadColumns];

INLINE void multiply_stage(Sums& gate, Sums& up, const float* stage, int row, int column) {
#pragma unroll
  for (int k = 0; k < kTileK; ++k) {
    float x[kThreadRows], g[kThreadColumns], u[kThreadColumns];
    read(x, stage + k * kXPitch + row);
    read(g, stage + kXFloats + k * kWeightPitch + column);
    read(u, stage + kXFloats + kHalfFloats + k * kWeightPitch + column);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) {
        gate[i][j] = __fmaf_rn(x[i], g[j], gate[i][j]);
        up[i][j] = __fmaf_rn(x[i], u[j], up[i][j]);
      }
    }
  }
}

KERNEL(kThreads, 1, simt_gated_gemm)(KERNEL_PARAMS(SimtGatedGemmParams) p) {
  u8* shared = ptx::dynamic_shared();
  const u32 ring = ptx::shared_address(shared);
  const Tile tile = tile_at<kTileM, kTileH>(blockIdx.x, p.extents);
  const int steps = ceiling_divide(p.extents.k, kTileK);
  const int row = threadIdx.x / (kTileH / kThreadColumns) * kThreadRows;
  const int column = threadIdx.x % (kTileH / kThreadColumns) * kThreadColumns;

  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) load_stage(p, ring + s * kStageFloats * 4, tile, s * kTileK);
    ptx::copy_async_commit();
  }
  Sums gate = {}, up = {};
  for (int step = 0; step < steps; ++step) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    if (next < steps) load_stage(p, ring + next % kStages * kStageFloats * 4, tile, next * kTileK);
    ptx::copy_async_commit();
    const float* stage = (const float*)shared + step % kStages * kStageFloats;
    multiply_stage(gate, up, stage, row, column);
  }

#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < kThreadColumns; j += 2) {
      const int to = tile.row + row + i, at = tile.column + column + j;
      store_pair(activate_pair(gate[i][j], gate[i][j + 1], up[i][j], up[i][j + 1], p.epilogue,
                               p.extents, to, at),
                 p.epilogue, p.extents, to, at);
    }
  }
}
