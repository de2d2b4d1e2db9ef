// y = h·W + b for few rows of h on Hopper, W [out, in]: the down projection behind sm90_skinny_gated_gemm.cu.
//
// As there, features are the rows of wgmma, tokens its columns, and weights are asked for before the grid before this
// one has ended. But a down projection has few features and a long k, of which a step of 64 is a short product
// behind several latencies: 190 ns in that kernel. An even share of the features for each SM, 8 to 64 of
// them, leaves nothing to be added up between blocks. So a stage of the ring holds PANELS steps of k, a warpgroup
// multiplies all of them before it waits, and WARPGROUPS take stages in turn, each with sums of its own part of k.
// In the end these are added up in the order of the warpgroups: the same bits on every launch. STAGES is a multiple of
// WARPGROUPS, so that a stage has one reader and one writer of each kind for good. Barriers tell odd rounds from even
// ones only: who waits for a round must have seen the one before it, or takes an older one for it.
//
// Two forms. A block has an SM to itself, and begins when one of the kernel before has left it. Or both kernels
// take half of the shared memory: blocks begin while those before them still multiply, and their first weights are under
// way, behind the last of the other kernel, where memory would be idle. For that the SM must divide all of
// its memory as shared memory, whatever the first kernel takes. This kernel must let the next grid go when it has asked
// for the last of its weights, not earlier, or that one's weights arrive before those that are waited for, and none are left
// for the time between; the first asks for its own at a pace, and lets this one go when it has asked for its tokens. And no
// two blocks of a kernel may share an SM while others are empty: of the first kernel by their memory, of this
// one by the registers of six warpgroups.
//
// Two warps ask for weights and two for tokens, every other stage each: a thread issues a copy in 30 to 50 cycles,
// and where a tile has 8 features an SM's share of memory brings its kilobyte in 56. Those of the
// tokens wait for the grid before this one.
//
// Rows of the instruction beyond TILE_H multiply whatever lies behind the features, and columns beyond the tokens
// that exist whatever the ring held before: neither depends on others, and both are dropped.
//
// Compile-time: ELEMENT 1|2; TILE_M 8, 16 or 32, at least the number of tokens; TILE_H a multiple of 8 up to 64;
// PANELS; WARPGROUPS; STAGES, a multiple of these; UNDER_WAY, stages of weights under way at any time, even and less than
// STAGES, 0 for as many; SHARED_BYTES as the host computed them. M, H and K are run-time values.
//
// Floors, what was measured and what was tried: docs/kernels/sm90_skinny_gemm.md.
#include "sm90/swap_ab.cuh"

constexpr int kTileM = TILE_M;
constexpr int kTileH = TILE_H;
constexpr int kTileK = 64;  // 128 bytes: one row of the 128-byte swizzle
constexpr int kPanels = PANELS;
constexpr int kWarpgroups = WARPGROUPS;
static_assert(kTileM % 8 == 0 && kTileM <= 32 && kTileH % 8 == 0 && kTileH <= 64, "a tile of one instruction");

constexpr int kConsumers = 128 * kWarpgroups;
constexpr int kFeeders = 2;  // warps for the weights, and as many for the tokens
constexpr int kThreads = kConsumers + 2 * 32 * kFeeders;

constexpr int kLineBytes = kTileK * 2;
constexpr int kWeightBytes = kTileH * kLineBytes, kTokenBytes = kTileM * kLineBytes;  // of a panel
constexpr int kTokensAt = kPanels * kWeightBytes;
constexpr int kStageBytes = kTokensAt + kPanels * kTokenBytes;
constexpr int kStages = STAGES;
static_assert(kStages % kWarpgroups == 0 && kWarpgroups % kFeeders == 0, "a stage stays with its warps");
constexpr u32 kUnderWay = UNDER_WAY;
static_assert(kUnderWay < kStages && kUnderWay % kFeeders == 0, "a feeder waits for its own stages, one round of them");
// What the instruction reads behind the last stage's last features.
constexpr int kBehindFeatures = (64 - kTileH) * kLineBytes - kPanels * kTokenBytes;
constexpr int kBehindRing = kBehindFeatures > 0 ? kBehindFeatures : 0;
constexpr u32 kSharedBytes = 1024 + kStages * (kStageBytes + 16) + kBehindRing;
static_assert(kSharedBytes == SHARED_BYTES, "the host and the kernel disagree about shared memory");

// The sums of a warpgroup, [token][feature], in place of the ring. Four floats more per row: the lanes of a warp
// then write to different banks.
constexpr int kSumsPitch = (kTileH + 4) * 4;
constexpr int kSumsBytes = kTileM * kSumsPitch;
static_assert(kWarpgroups * kSumsBytes <= kStages * kStageBytes, "the sums fit in the ring");

struct alignas(64) Sm90SkinnyGemmParams {
  ptx::TensorMap tokens, weights;  // boxes of one panel; of the rows that there are
  Extents extents;                 // features are those of y
  u64 y;
  i64 y_stride;
  u64 bias;  // elements; 0: none
};

typedef StageRing<kStages, kStageBytes, kStages * kStageBytes + kBehindRing> Ring;

// Stages of k. The last may have panels behind its end, which are zeros.
INLINE u32 turns(const Extents& e) { return ceiling_divide(e.k, kPanels * kTileK); }

// Asks for a panel's `bytes`, for every panel of the stages of one of the feeders: `load(to, barrier, k)`. At most
// MOST stages are under way, where that is not 0.
template <u32 MOST, class Load>
INLINE void feed(const Extents& e, const Ring& ring, u32 feeder, u32 at, u32 pitch, u32 bytes, Load load) {
  const u32 all = turns(e);
#pragma unroll 1
  for (u32 turn = feeder; turn < all; turn += kFeeders) {
    claim_stage<MOST>(ring, turn, kPanels * bytes);
    const u32 full = ring.full_barrier(turn), to = ring.stage(turn) + at;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) load(to + i * pitch, full, (turn * kPanels + i) * kTileK);
  }
}

// Every other 16 of k has sums of its own, where these are few: the next product does not wait for them. With fewer
// registers, besides, two blocks would share an SM: see the host.
constexpr int kSets = kTileM == 8 ? 2 : 1;
typedef float Sums[kTileM / 2];

INLINE void multiply(Sums (&d)[kSets], const Extents& e, const Ring& ring, u32 warpgroup) {
  // A warpgroup without a stage adds zeros.
#pragma unroll
  for (int i = 0; i < kSets * kTileM / 2; ++i) d[i % kSets][i / kSets] = 0.0f;
  // The other warpgroups multiply while this one waits.
  multiply_stages<kWarpgroups, true>(ring, warpgroup, turns(e), [](u32) {}, [&](u32 stage, u32) {
    const u64 weights = ptx::swizzled_operand(stage, 0), tokens = ptx::swizzled_operand(stage + kTokensAt, 0);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
#pragma unroll
      for (int j = 0; j < kTileK / 16; ++j) {
        // Units of 16 bytes; 16 k are 32 bytes.
        ptx::wgmma<kTileM, kIsBf16, false>(d[j % kSets], operand_further(weights, (i * kWeightBytes + j * 32) / 16),
                                           operand_further(tokens, (i * kTokenBytes + j * 32) / 16), true);
      }
    }
  });
}

// Two features of a token to each thread at a time.
INLINE void finish(const Sm90SkinnyGemmParams& p, const Ring& ring) {
  constexpr int kPairs = kTileH / 2;
  const int first = blockIdx.x * kTileH;
  for (int i = threadIdx.x; i < p.extents.m * kPairs; i += kConsumers) {
    const int token = i / kPairs, feature = i % kPairs * 2, column = first + feature;
    const u32 at = ring.base + token * kSumsPitch + feature * 4;
    OutputPair y = {};
#pragma unroll
    for (int w = 0; w < kWarpgroups; ++w) {
      const ptx::Raw<8> part = ptx::load_shared_pair(at + w * kSumsBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) y.value[c] = __fadd_rn(y.value[c], ptx::as_float(part.word[c]));
    }
    add_biases(y, p.bias, column, p.extents);
    store_pair(y, p.y, p.y_stride, p.extents, token, column);
  }
}

INLINE void consume(const Sm90SkinnyGemmParams& p, const Ring& ring) {
  const u32 warpgroup = warpgroup_number();
  Sums d[kSets];
  multiply(d, p.extents, ring, warpgroup);
  if constexpr (kSets == 2) {
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) d[0][i] = __fadd_rn(d[0][i], d[1][i]);
  }
  // Every stage has been multiplied: the sums may take their place.
  ptx::named_barrier<1>(kConsumers);
  store_sums<kSumsPitch, kTileH>(d[0], ring.base + warpgroup * kSumsBytes, threadIdx.x % 128 / 32);
  ptx::named_barrier<1>(kConsumers);
  finish(p, ring);
}

// The elected lane of a warp that asks for copies: weights first, so that they are under way before anything else.
INLINE void produce(const Sm90SkinnyGemmParams& p, const Ring& ring) {
  const u32 warp = (threadIdx.x - kConsumers) / 32;
  if (warp < kFeeders) {
    const u64 policy = ptx::policy_evict_first();
    feed<kUnderWay>(p.extents, ring, warp, 0, kWeightBytes, kWeightBytes, [&](u32 to, u32 full, int k) {
      ptx::tensor_load(to, &p.weights, full, k, blockIdx.x * kTileH, policy);
    });
    // The next grid may read weights from here on: the kernel before this one has waited for all that wrote them before
    // it let this one go.
    ptx::grid_dependency_launch();
  } else {
    ptx::grid_dependency_wait();
    const u32 bytes = p.extents.m * kLineBytes;
    feed<0>(p.extents, ring, warp - kFeeders, kTokensAt, kTokenBytes, bytes,
         [&](u32 to, u32 full, int k) { ptx::tensor_load(to, &p.tokens, full, k, 0); });
  }
}

KERNEL(kThreads, 1, sm90_skinny_gemm)(KERNEL_PARAMS(Sm90SkinnyGemmParams) p) {
  const Ring ring(ptx::shared_address(ptx::dynamic_shared()));
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&p.weights);
    ptx::prefetch_tensor_map(&p.tokens);
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ring.full_barrier(s), 2);  // one of each kind of feeder
      ptx::barrier_init(ring.empty_barrier(s), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    // What is written below may still be read by the grids before.
    ptx::grid_dependency_wait();
    consume(p, ring);
  } else if (ptx::elect()) {
    produce(p, ring);
  }
}
