// y = h·W + b for up to 8 rows of h on Hopper, W [out, in], where a multiprocessor's share of the weights fits into its
// registers: the down projection of small blocks behind sm90_skinny_gated_gemm.cu.
//
// With so few weights nothing but latencies is left: of the answer of the kernel before, of tokens, of weights that found
// no room in a ring before there were tokens. Here every weight has a register: all of them are under way while the
// kernel before this one still multiplies, whose weights have the shared memory to themselves, and nothing
// of either product waits for room. When h is there each thread asks for all of its tokens at once.
//
// Slices of 32 of k go to the warps in turn. Of a slice a lane reads 16 bytes of a feature's row, and 16 bytes of a
// token's, which is what it has in two fragments m16n8k16 with tokens as the rows, where the order of k within a slice is
// free (as in decode_tiles.cuh). Rows 8 to 15 would be eight more tokens: they are zeros. Sums of the warps
// meet in shared memory and are added up in the order of the warps: the same bits on every launch.
//
// Compile-time: ELEMENT 1|2; TILE_H 8 or 16, features of a block; WARPS; STEPS, slices of a warp. M up to 8, H and K, a
// multiple of 8, are run-time values.
//
// Floors: 2·K·N bytes at 4.23 TB/s: 2.1 µs for 4864 → 896; each block reads h from the second-level cache, with 8
// tokens 8.7 MB in all. Predicted for the whole block of 896/4864, where two rings beside each other took 10.5 µs for
// 1 to 8 tokens and all weights take 6.2: 8 to 8.5 with one token, 9 to 9.5 with 8. Measured on an H200, bf16, blocks in
// a graph with cold weights, µs (`swiglu tune`; lab/logs/nvidia-h200, decode-paces):
//     M                                     1      2      4      8
//     the gated weights asked for at once   10.2   10.2   10.2   11.8
//     at a pace, the next grid let go       9.2    9.2    10.0   11.4
//     sm90_skinny_gemm.cu, so too           10.0   10.0   10.0   10.0
// The miss: what is asked for at once comes as a whole, 4 µs after; see UNDER_WAY in sm90_skinny_gated_gemm.cu. And tokens, of
// which every block reads all at once: with 8 they take longer than in a ring, 1.5 µs more than with one. Refuted: the
// next grid let go before the wait, as long as weights do not come at a pace (0 to 1.6 µs more). The next idea: blocks
// that share h through a cluster.
#include "tiles.cuh"

constexpr int kTokens = 8;
constexpr int kTileH = TILE_H;
constexpr int kWarps = WARPS;
constexpr int kSteps = STEPS;
constexpr int kGroups = kTileH / 8;
static_assert(kTileH == 8 || kTileH == 16, "one group of eight features, or two");
static_assert(!kIsF32, "fragments are 16-bit");

constexpr int kThreads = 32 * kWarps;
constexpr int kSlice = 32;  // of k: 64 bytes, 16 for each of four lanes

// The sums of a warp, [token][feature].
constexpr int kSumsPitch = kTileH * 4;
constexpr int kSumsBytes = kTokens * kSumsPitch;
static_assert(kWarps * kSumsBytes == SHARED_BYTES, "the host and the kernel disagree about shared memory");

struct Sm90RegisterGemmParams {
  u64 x, weights, y;
  i64 x_stride, weights_stride, y_stride;  // elements from row to row
  Extents extents;                         // features are those of y
  u64 bias;                                // elements; 0: none
};

typedef ptx::Raw<16> Fragments[kSteps];

// 16 bytes of every slice of a warp, of row `row` of a matrix with `rows`; what does not exist is zeros.
template <class Load>
INLINE void load_slices(Fragments& to, u64 matrix, i64 stride, int row, int rows, int k, Load load) {
  const int warp = threadIdx.x / 32, column = warp * kSlice + threadIdx.x % 4 * 8;
  const u64 from = matrix + (row * stride + column) * kElementBytes;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    constexpr int kTurn = kWarps * kSlice;
    const bool exists = row < rows && column + i * kTurn < k;
    to[i] = load(exists, (const ptx::Raw<16>*)(from + i * kTurn * kElementBytes));
  }
}

// Products that do not wait for each other.
constexpr int kSets = 4 / kGroups;
typedef float Sums[kSets][4];

INLINE void multiply(Sums& d, const Fragments& tokens, const Fragments& weights) {
#pragma unroll
  for (int i = 0; i < kSets * 4; ++i) d[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps * 2; ++i) {
    const ptx::Raw<16>&t = tokens[i / 2], &w = weights[i / 2];
    const int j = i % 2 * 2;
    const u32 a[4] = {t.word[j], 0, t.word[j + 1], 0};
    if constexpr (kIsF16) {
      ptx::mma_f16(d[i % kSets], a, w.word[j], w.word[j + 1]);
    } else {
      ptx::mma_bf16(d[i % kSets], a, w.word[j], w.word[j + 1]);
    }
  }
#pragma unroll
  for (int i = 1; i < kSets; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) d[0][c] = __fadd_rn(d[0][c], d[i][c]);
  }
}

// Two features of a token to each thread.
INLINE void finish(const Sm90RegisterGemmParams& p, u32 sums) {
  constexpr int kPairs = kTileH / 2;
  const int token = threadIdx.x / kPairs, feature = threadIdx.x % kPairs * 2;
  const int column = blockIdx.x * kTileH + feature;
  if (token >= p.extents.m) return;
  OutputPair y = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const ptx::Raw<8> part = ptx::load_shared_pair(sums + w * kSumsBytes + token * kSumsPitch + feature * 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) y.value[c] = __fadd_rn(y.value[c], ptx::as_float(part.word[c]));
  }
  if (p.bias != 0) {
    const Element* bias = (const Element*)p.bias + column;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (column + c < p.extents.features) y.value[c] = __fadd_rn(y.value[c], element_to_float(bias[c]));
    }
  }
  store_pair(y, p.y, p.y_stride, p.extents, token, column);
}

KERNEL(kThreads, 1, sm90_register_gemm)(KERNEL_PARAMS(Sm90RegisterGemmParams) p) {
  const int row = threadIdx.x % 32 / 4;
  Fragments weights[kGroups], tokens;
  const u64 policy = ptx::policy_evict_first();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int feature = blockIdx.x * kTileH + g * 8 + row;
    load_slices(weights[g], p.weights, p.weights_stride, feature, p.extents.features, p.extents.k,
                [&](bool exists, const ptx::Raw<16>* at) { return ptx::load_global_if(exists, at, policy); });
  }
  // The next grid may read weights from here on: the kernel before this one has waited for all that wrote them before
  // it let this one go.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  load_slices(tokens, p.x, p.x_stride, row, p.extents.m, p.extents.k,
              [&](bool exists, const ptx::Raw<16>* at) { return ptx::load_global_if(exists, at); });
  const u32 sums = ptx::shared_address(ptx::dynamic_shared());
  const u32 to = sums + threadIdx.x / 32 * kSumsBytes + row * kSumsPitch + threadIdx.x % 4 * 8;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    Sums d;
    multiply(d, tokens, weights[g]);
#pragma unroll
    for (int c = 0; c < 2; ++c) ptx::store_shared(to + g * 32 + c * 4, ptx::as_bits(d[0][c]));
  }
  __syncthreads();
  finish(p, sums);
}
