// y = h·W + b for up to 8 rows of h on Hopper, W [out, in], where an SM's share of the weights fits into its
// registers: the down projection of small blocks behind sm90_skinny_gated_gemm.cu.
//
// With so few weights nothing but latencies is left: of the answer of the kernel before, of tokens, of weights that found
// no room in a ring before there were tokens. Here every weight has a register: all of them are under way while the
// kernel before this one still multiplies, whose weights have the shared memory to themselves, and nothing
// of either product waits for room, which is what it wins over sm90_skinny_gemm.cu. When h is there each thread asks for all of its tokens at once.
//
// The blocks of a cluster share k: each multiplies its part for the features of all of them, and so reads only that part of
// h. Slices of 32 of k go to the warps in turn. Of a slice a lane reads 16 bytes of a feature's row, and 16 bytes of a
// token's, which is what it has in two fragments m16n8k16 with tokens as the rows, where the order of k within a slice is
// free (as in decode_tiles.cuh). Rows 8 to 15 would be eight more tokens: they are zeros. Sums of the warps meet in
// shared memory and are added up in the order of the warps, then go to the block that has their features (st.async), which
// adds them up in the order of the blocks: the same bits on every launch.
//
// Compile-time: ELEMENT 1|2; TILE_H 8 or 16, features of a block; CLUSTER 2 or 4, the blocks of a cluster, four groups of
// eight features at most; WARPS; STEPS, slices of a warp; SHARED_BYTES as the host computed them. M up to 8, H and K, a
// multiple of 8, are run-time values.
//
// Floors, what was measured and what was tried: docs/kernels/sm90_register_gemm.md.
#include "lib/tiles.cuh"

constexpr int kTokens = 8;
constexpr int kTileH = TILE_H;
constexpr int kCluster = CLUSTER;
constexpr int kWarps = WARPS;
constexpr int kSteps = STEPS;
constexpr int kOwnGroups = kTileH / 8, kGroups = kCluster * kOwnGroups;  // of eight features: of y, of products
static_assert(kTileH == 8 || kTileH == 16, "one group of eight features, or two");
static_assert(kCluster == 2 || kCluster == 4, "blocks that share k");
static_assert(kWarps % 2 == 0 && kGroups * 32 <= 32 * kWarps, "pairs of warps, and a thread for each pair of sums");
static_assert(!kIsF32, "fragments are 16-bit");

constexpr int kThreads = 32 * kWarps;
constexpr int kSlice = 32;  // of k: 64 bytes, 16 for each of four lanes

// The sums of eight features, [token][feature], as pairs: one for each thread of a warp.
constexpr int kSumsBytes = kTokens * 8 * 4;
// [group][warp] of this block's part of k; behind them [block][own group] of all parts, and the barrier they come by.
constexpr int kPartsAt = kGroups * kWarps * kSumsBytes, kPartsBytes = kCluster * kOwnGroups * kSumsBytes;
constexpr int kBarrierAt = kPartsAt + kPartsBytes;
static_assert(kBarrierAt + 8 == SHARED_BYTES, "the host and the kernel disagree about shared memory");

struct Sm90RegisterGemmParams {
  u64 x, weights, y;
  i64 x_stride, weights_stride, y_stride;  // elements from row to row
  Extents extents;                         // features are those of y
  u64 bias;                                // elements; 0: none
};

typedef ptx::Raw<16> Fragments[kSteps];

// 16 bytes of every slice of a warp, of row `row` of a matrix with `rows`; what does not exist is zeros. Pairs of slices,
// which are a line of memory, go to pairs of warps of the blocks in turn.
template <class Load>
INLINE void load_slices(Fragments& to, u64 matrix, i64 stride, int row, int rows, int k, Load load) {
  const int warp = threadIdx.x / 32, slice = (warp / 2 * kCluster + ptx::cluster_rank()) * 2 + warp % 2;
  const int column = slice * kSlice + threadIdx.x % 4 * 8;
  const u64 from = matrix + (row * stride + column) * kElementBytes;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    constexpr int kTurn = kCluster * kWarps * kSlice;
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

// A pair of sums over COUNT parts, in their order; each lies DISTANCE bytes behind the one before.
template <int COUNT, int DISTANCE>
INLINE OutputPair add_up(u32 at) {
  OutputPair sum = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const ptx::Raw<8> part = ptx::load_shared_pair(at + i * DISTANCE);
#pragma unroll
    for (int c = 0; c < 2; ++c) sum.value[c] = __fadd_rn(sum.value[c], ptx::as_float(part.word[c]));
  }
  return sum;
}

// The sums of this block's part of k go to the blocks that have their features, each to the place of this block there.
// Who waits for them acquires at the block's scope, as for copies of TMA that another block asked for.
INLINE void hand_over(u32 shared, u32 group, u32 pair) {
  const OutputPair sum = add_up<kWarps, kSumsBytes>(shared + group * kWarps * kSumsBytes + pair * 8);
  const u32 owner = group / kOwnGroups;
  const u32 to = shared + kPartsAt + (ptx::cluster_rank() * kOwnGroups + group % kOwnGroups) * kSumsBytes + pair * 8;
  ptx::Raw<8> raw;
  raw.word[0] = ptx::as_bits(sum.value[0]);
  raw.word[1] = ptx::as_bits(sum.value[1]);
  ptx::store_shared_cluster(ptx::cluster_address(to, owner), raw, ptx::cluster_address(shared + kBarrierAt, owner));
}

// Two features of a token to each thread.
INLINE void finish(const Sm90RegisterGemmParams& p, u32 shared) {
  const u32 group = threadIdx.x / 32, pair = threadIdx.x % 32;
  if (group < kGroups) hand_over(shared, group, pair);
  if (group >= kOwnGroups) return;
  ptx::barrier_wait(shared + kBarrierAt, 0);
  OutputPair y = add_up<kCluster, kOwnGroups * kSumsBytes>(shared + kPartsAt + group * kSumsBytes + pair * 8);
  const int token = pair / 4, column = blockIdx.x * kTileH + group * 8 + pair % 4 * 2;
  add_biases(y, p.bias, column, p.extents);
  store_pair(y, p.y, p.y_stride, p.extents, token, column);
}

// The barrier for the parts of all blocks, before any of them comes.
INLINE void begin_sharing(u32 shared) {
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared + kBarrierAt, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expect(shared + kBarrierAt, kPartsBytes);
  }
  ptx::cluster_arrive();
}

KERNEL(kThreads, 1, sm90_register_gemm)(KERNEL_PARAMS(Sm90RegisterGemmParams) p) {
  const u32 shared = ptx::shared_address(ptx::dynamic_shared());
  begin_sharing(shared);
  const int row = threadIdx.x % 32 / 4;
  Fragments weights[kGroups], tokens;
  const u64 policy = ptx::policy_evict_first();
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int feature = blockIdx.x / kCluster * (kGroups * 8) + g * 8 + row;
    load_slices(weights[g], p.weights, p.weights_stride, feature, p.extents.features, p.extents.k,
                [&](bool exists, const ptx::Raw<16>* at) { return ptx::load_global_if(exists, at, policy); });
  }
  // The next grid may read weights from here on: the kernel before this one has waited for all that wrote them before
  // it let this one go.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  load_slices(tokens, p.x, p.x_stride, row, p.extents.m, p.extents.k,
              [&](bool exists, const ptx::Raw<16>* at) { return ptx::load_global_if(exists, at); });
  const u32 to = shared + threadIdx.x / 32 * kSumsBytes + threadIdx.x % 32 * 8;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    Sums d;
    multiply(d, tokens, weights[g]);
#pragma unroll
    for (int c = 0; c < 2; ++c) ptx::store_shared(to + g * kWarps * kSumsBytes + c * 4, ptx::as_bits(d[0][c]));
  }
  // Every block of the cluster has begun, and has its barrier.
  ptx::cluster_wait();
  __syncthreads();
  finish(p, shared);
}
