// h = act(x·Wg + bg, x·Wu + bu) for few rows of x on Hopper: a tile for each block, its weights under way before
// x is there.
//
// wgmma has 64 rows at least. With few tokens these are features of the weights, and the tokens are its
// columns, TILE_M of them: no row is wasted on tokens that do not exist. Two instructions with the same tokens,
// one for the gate's features and one for the up's, leave the two pre-activations of an output in the same
// register of two arrays. One thread feeds a ring of STAGES tiles through TMA; a tile has TILE_H
// features, and up to three warpgroups with up to 64 of them each multiply. The rows of the last warpgroup
// beyond TILE_H multiply whatever lies behind the features: rows do not depend on each other, and these are
// dropped.
//
// There are four forms. TILE_H 64: two blocks share an SM, so that one streams while the other ends;
// SPLIT blocks, a cluster, can each multiply a part of k, and then add up their shares of the tokens through
// distributed shared memory, always in the order of their ranks: the same bits on every launch. TILE_H
// fitted to the layer, so that each SM has an even share of the features and one block with all of
// its shared memory: x is read by as few blocks as there can be. The same with TILE_M fitted to the tokens, an even
// share of them for each row of tiles: above 128, where arithmetic is the limit, two warpgroups have up to 192 sums
// a thread. And, with TOKEN_ROWS, tokens are the
// rows, 64 for each warpgroup, and the columns are the tile's features of the gate with those of the up behind
// them, up to 256 in an instruction: as many as there are, not the next multiple of 64. With many tokens that is
// less to multiply, and the two pre-activations of an output meet in one thread as well.
//
// Weights are asked for before the grid before this one has ended, for as many stages as the ring has: a
// layer's weights are uploaded once, by copies, which no kernel runs beside. In a feed-forward block that goes on with
// sm90_skinny_gemm.cu or sm90_register_gemm.cu there are more forms of a fitted tile: see there. Where a block shares its
// SM with one of those, weights come at a pace, UNDER_WAY stages at a time. This kernel then begins while the
// one before multiplies, and 140 KB that an SM asks for at once take 4 µs to come, behind which that one's
// tokens would wait; x is then asked for by a warp of its own, as soon as it is there. Or, with X_AT_ONCE, by all threads
// that multiply, as much of it as the ring has room for. In a block whose second kernel follows on the same SMs
// weights come at a pace where stages are few and large.
//
// Compile-time: ELEMENT 1|2; ORIENTATION 0 = weights [out, in], 1 = [in, out]; TOKEN_ROWS as above; TILE_M a multiple
// of 8, of 64 with TOKEN_ROWS; TILE_H a multiple of 8, of 64 for [in, out], and of 16 where gate and up take an
// instruction each; SPLIT 1, 2, 4 or 8, 1 with TOKEN_ROWS; RESIDENTS, blocks of an SM; STAGES;
// SHARED_BYTES as the host computed them; RELEASE_AT_ONCE, whether a stage is given back before the next one is multiplied;
// UNDER_WAY, less than STAGES, 0 for as many; X_AT_ONCE, only at such a pace; BIAS; and what gate.cuh names. M, H and K
// are run-time values; there are SPLIT steps of k at least. What lies outside of the weights is read as zeros.
//
// Floors: up to about M = 128 the weights, 4·H·K bytes, from memory. By Little's law that takes about 21 KB in flight
// per SM (650 ns); the rings hold up to 196 KB. What was measured and tried: docs/kernels/sm90_skinny_gated_gemm.md.
#include "lib/gated_gemm.cuh"
#include "sm90/swap_ab.cuh"

constexpr int kTileM = TILE_M;
constexpr int kTileH = TILE_H;
constexpr int kTileK = 64;  // 128 bytes: one row of the 128-byte swizzle
constexpr int kSplit = SPLIT;
constexpr bool kTokenRows = TOKEN_ROWS != 0;
static_assert(kTileM % 8 == 0 && kTileM <= 192, "two times TILE_M / 2 sums per thread");
static_assert(kTileH % (kInOut ? 64 : 8) == 0, "whole rows of the swizzle, or eight lines of it");
static_assert(kSplit == 1 || kSplit == 2 || kSplit == 4 || kSplit == 8, "a portable cluster");
static_assert(kTileH <= (kTokenRows || kTileM <= 128 ? 192 : 128), "three warpgroups, or two with many sums");

// Features that gate and up of a tile may have in one instruction.
constexpr int kTogether = kTokenRows && kTileM == 192 ? 80 : 128;
static_assert(!kTokenRows || (kTileM % 64 == 0 && kSplit == 1 && (kTileH <= kTogether || kTileH % 16 == 0)),
              "whole instructions of an even number of eights of columns");

// Each has up to 64 features or tokens, the rows of the instruction.
constexpr int kWarpgroups = kTokenRows ? kTileM / 64 : (kTileH + 63) / 64;
constexpr int kConsumers = 128 * kWarpgroups;
// With the producer's warp three warpgroups have 128 registers of a thread, two have 168. Where that is not enough
// for the sums of so many columns, they take those of a whole warpgroup of producers.
constexpr bool kTakesRegisters = kTokenRows ? kWarpgroups > 1 && kTileH > (kWarpgroups == 2 ? 96 : 64)
                                            : kWarpgroups > 1 && kTileM >= (kWarpgroups == 2 ? 129 : 128);
constexpr int kLeft = kTokenRows || kWarpgroups == 2 ? 40 : 32;
constexpr int kTaken = kWarpgroups == 2 ? 232 : kTokenRows ? 152 : 160;
// Whether weights come at a pace, by a warp that does nothing else.
constexpr int kUnderWay = UNDER_WAY;
constexpr bool kPaced = kUnderWay != 0;
constexpr bool kXAtOnce = X_AT_ONCE != 0;
static_assert(kPaced || !kXAtOnce, "a warp of its own brings the rest of x");
static_assert(!(kPaced && (kTakesRegisters || kSplit > 1)), "two warps of producers, and a block for all of k");
constexpr int kThreads = kConsumers + (kTakesRegisters ? 128 : kPaced ? 64 : 32);

constexpr int kGroupBytes = 64 * kTileK * 2;  // of 64 features or tokens
constexpr int kHalfBytes = kTileH * kTileK * 2;
constexpr int kXBytes = kTileM * kTileK * 2;
constexpr int kXAt = 2 * kHalfBytes;  // behind gate and up
constexpr int kStageBytes = kXAt + kXBytes;
constexpr int kStages = STAGES;
constexpr bool kReleasesAtOnce = RELEASE_AT_ONCE != 0;
static_assert(kUnderWay < kStages, "a barrier tells odd rounds from even ones only");
// Barriers of a stage: for what has come, for what has been multiplied, and, where weights come at a pace, for x.
constexpr int kBarrierBytes = kPaced ? 24 : 16;
// What the last warpgroup reads behind its last features: more than x where tokens are few.
constexpr int kBehindHalf = kTokenRows ? 0 : kWarpgroups * kGroupBytes - kHalfBytes;
constexpr int kBehindRing = kBehindHalf > kXBytes ? kBehindHalf - kXBytes : 0;
constexpr u32 kSharedBytes = 1024 + kStages * (kStageBytes + kBarrierBytes) + kBehindRing;
static_assert(kSharedBytes == SHARED_BYTES, "the host and the kernel disagree about shared memory");

// The sums of a tile, as [gate, up][token][feature], in place of the ring. Four floats more per row:
// the lanes of a warp then write to different banks.
constexpr int kSumsPitch = (64 * kWarpgroups + 4) * 4;
constexpr int kSumsBytes = kTileM * kSumsPitch;
static_assert(kSplit == 1 || 2 * kSumsBytes <= kStages * kStageBytes, "the sums fit in the ring");

struct alignas(64) Sm90SkinnyGatedGemmParams {
  ptx::TensorMap x, last_x, gate, up;  // boxes of one stage; the last rows of x may be fewer than a tile's
  u64 x_rows;
  i64 x_stride;  // elements
  Extents extents;
  EpilogueParams epilogue;
};

typedef StageRing<kStages, kStageBytes, kStages * kStageBytes + kBehindRing> Ring;

// The first step whose x comes through TMA.
constexpr int kFirstOfX = kXAtOnce ? kStages : 0;

// Where x of a step has come, and the weights too if they do not come at a pace of their own.
INLINE u32 x_barrier(const Ring& ring, u32 step) {
  return kPaced ? ring.empty_barrier(step) + 8 * kStages : ring.full_barrier(step);
}

INLINE u32 split_rank() { return kSplit > 1 ? ptx::cluster_rank() : 0; }

INLINE Tile own_tile(const Extents& e) {
  return tile_at<kTileM, kTileH>(blockIdx.x / kSplit, e);
}

// The steps of k that are this block's.
struct Steps {
  int first, count;
};
INLINE Steps own_steps(const Extents& e) {
  const int all = ceiling_divide(e.k, kTileK), rank = split_rank();
  const int first = all * rank / kSplit;
  return {first, all * (rank + 1) / kSplit - first};
}

// What the thread that asks for copies does, or one of two.
struct Producer {
  const Sm90SkinnyGatedGemmParams& p;
  const Ring& ring;
  const Tile tile = own_tile(p.extents);
  const Steps steps = own_steps(p.extents);
  const int rows = copied_rows<kTileM>(p.extents, tile.row);
  // Where nobody reads them again, weights are the first to leave L2.
  const u64 policy = p.extents.m <= kTileM ? ptx::policy_evict_first() : ptx::policy_evict_normal();

  INLINE int k_of(u32 step) const { return (steps.first + step) * kTileK; }

  INLINE void load_half(const ptx::TensorMap& map, u32 to, u32 step) const {
    const u32 full = ring.full_barrier(step);
    if constexpr (kInOut) {
#pragma unroll
      for (int i = 0; i < kTileH / 64; ++i) {
        ptx::tensor_load(to + i * kGroupBytes, &map, full, tile.column + 64 * i, k_of(step), policy);
      }
    } else {
      ptx::tensor_load(to, &map, full, k_of(step), tile.column, policy);
    }
  }

  // Announces a stage, and asks for its weights.
  INLINE void load_weights(u32 step) const {
    claim_stage<kUnderWay>(ring, step, 2 * kHalfBytes + (kPaced ? 0 : x_bytes()));
    load_half(p.gate, ring.stage(step), step);
    load_half(p.up, ring.stage(step) + kHalfBytes, step);
  }

  INLINE int x_bytes() const { return rows * (kTileK * 2); }

  INLINE void load_x(u32 step) const {
    if constexpr (kPaced) ptx::barrier_arrive_expect(x_barrier(ring, step), x_bytes());
    const u32 to = ring.stage(step) + kXAt;
    const ptx::TensorMap& x = rows == kTileM ? p.x : p.last_x;
    ptx::tensor_load(to, &x, x_barrier(ring, step), k_of(step), tile.row);
  }

  // By two threads: one for the weights, before and behind the grid before this one, and one for x.
  INLINE void bring_weights() const {
#pragma unroll 1
    for (u32 step = 0; step < (u32)steps.count; ++step) load_weights(step);
  }
  INLINE void bring_x() const {
#pragma unroll 1
    for (u32 step = kFirstOfX; step < (u32)steps.count; ++step) {
      ptx::barrier_wait(ring.empty_barrier(step), Ring::parity(step) ^ 1);
      load_x(step);
    }
  }

  // By one thread. Steps that the ring has room for.
  INLINE u32 first_round() const { return steps.count < kStages ? steps.count : kStages; }

  // Before the grid before this one is waited for: weights are nobody's result.
  INLINE void begin() const {
    for (u32 step = 0; step < first_round(); ++step) load_weights(step);
  }

  INLINE void finish() const {
    for (u32 step = 0; step < first_round(); ++step) load_x(step);
    for (u32 step = first_round(); step < (u32)steps.count; ++step) {
      load_weights(step);
      load_x(step);
    }
  }
};

// x of the first round, by all threads that multiply.
INLINE void bring_first_x(const Sm90SkinnyGatedGemmParams& p, const Ring& ring, const LineCopies<kConsumers>& x) {
  const int all = ceiling_divide(p.extents.k, kTileK);
  x.copy(0, all < kStages ? all : kStages, [&](int step) { return ring.base + step * kStageBytes + kXAt; });
  // The next grid may read weights from here on, as where x comes through TMA: all before this one have ended.
  // They come behind x.
  if (threadIdx.x == 0) ptx::grid_dependency_launch();
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  ptx::fence_async_shared();
  ptx::named_barrier<1>(kConsumers);
}

INLINE void init_barriers(const Ring& ring) {
  for (int s = 0; s < kStages; ++s) {
    ptx::barrier_init(ring.full_barrier(s), 1);
    ptx::barrier_init(ring.empty_barrier(s), kWarpgroups);
    if constexpr (kPaced) ptx::barrier_init(x_barrier(ring, s), 1);
  }
  ptx::barrier_init_fence();
}

// Descriptor units are 16 bytes; 16 k further.
constexpr u32 kXStep = 32 / 16;
constexpr u32 kWeightStep = kInOut ? 16 * 128 / 16 : 32 / 16;

// All of this block's k: `product(stage, j, accumulate)` multiplies 16 of it.
template <class Product>
INLINE void multiply(const Sm90SkinnyGatedGemmParams& p, const Ring& ring, Product product) {
  const auto x_arrived = [&](u32 step) {
    if (kPaced && (int)step >= kFirstOfX) ptx::barrier_wait(x_barrier(ring, step), Ring::parity(step - kFirstOfX));
  };
  multiply_stages<1, kReleasesAtOnce>(ring, 0, own_steps(p.extents).count, x_arrived, [&](u32 stage, u32 step) {
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) product(stage, j, (step | j) != 0);
  });
  ptx::wgmma_wait<0>();
}

#if TOKEN_ROWS

// Instructions that have a tile's columns: one with the gate's and the up's, or one for each, also where the sums of one
// do not fit into 128 registers, which the compiler counts with for three warpgroups.
constexpr int kInstructions = kTileH <= kTogether ? 1 : 2;
constexpr int kColumns = 2 * kTileH / kInstructions;
typedef float Sums[kInstructions][kColumns / 2];

INLINE void multiply_tile(Sums& d, const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  const u32 first = kXAt + warpgroup_number() * kGroupBytes;
  multiply(p, ring, [&](u32 stage, int j, bool accumulate) {
    const u64 x = operand_further(ptx::swizzled_operand(stage + first, 0), j * kXStep);
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      // Weights [in, out] lie in panels of 64 features.
      const u64 w = ptx::swizzled_operand(stage + i * kHalfBytes, kGroupBytes);
      ptx::wgmma<kColumns, kIsBf16, kInOut>(d[i], x, operand_further(w, j * kWeightStep), accumulate);
    }
  });
}

INLINE void finish_rows(const Sums& d, const Sm90SkinnyGatedGemmParams& p) {
  const Tile tile = own_tile(p.extents);
  const u32 lane = threadIdx.x % 32;
  const int first = tile.row + threadIdx.x / 32 * 16 + lane / 4;
  // Where the up's sums begin.
  constexpr int kUp = kInstructions == 1 ? kTileH / 2 : 0;
  const auto& gate = d[0];
  const auto& up = d[kInstructions - 1];
#pragma unroll
  for (int j = 0; j < kTileH / 8; ++j) {
    const int column = tile.column + 8 * j + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + 8 * i, at = 4 * j + 2 * i;
      if (row >= p.extents.m || column >= p.extents.features) continue;
      const OutputPair h = activate_pair(gate[at], gate[at + 1], up[kUp + at], up[kUp + at + 1], p.epilogue,
                                         p.extents, row, column);
      store_pair(h, p.epilogue, p.extents, row, column);
    }
  }
}

INLINE void consume(const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  Sums d;
  multiply_tile(d, p, ring);
  finish_rows(d, p);
}

#else

typedef float Sums[kTileM / 2];

INLINE void multiply_tile(Sums& gate, Sums& up, const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  const u32 first = warpgroup_number() * kGroupBytes;
  multiply(p, ring, [&](u32 stage, int j, bool accumulate) {
    const u64 wg = operand_further(ptx::swizzled_operand(stage + first, 0), j * kWeightStep);
    const u64 wu = operand_further(ptx::swizzled_operand(stage + kHalfBytes + first, 0), j * kWeightStep);
    const u64 x = operand_further(ptx::swizzled_operand(stage + kXAt, 0), j * kXStep);
    ptx::wgmma<kTileM, kIsBf16, false, kInOut>(gate, wg, x, accumulate);
    ptx::wgmma<kTileM, kIsBf16, false, kInOut>(up, wu, x, accumulate);
  });
}

// The sums of a block that has all of k go straight from registers.

// Element 4j + 2i + c of a thread is feature 64·warpgroup + 16·warp + lane/4 + 8i of token
// 8j + 2(lane % 4) + c. Lanes of neighbouring features exchange: the even one takes both features of the
// first token, the odd one those of the second.
INLINE OutputPair exchange(float first, float second, bool odd) {
  const float got = __shfl_xor_sync(~0u, odd ? first : second, 4);
  return odd ? OutputPair{got, second} : OutputPair{first, got};
}

// Stores h of two features of a token.
INLINE void store_features(const OutputPair& gate, const OutputPair& up,
                           const Sm90SkinnyGatedGemmParams& p, int row, int column) {
  const OutputPair h = activate_pair(gate.value[0], gate.value[1], up.value[0], up.value[1],
                                     p.epilogue, p.extents, row, column);
  store_pair(h, p.epilogue, p.extents, row, column);
}

INLINE void finish_own(const Sums& gate, const Sums& up, const Sm90SkinnyGatedGemmParams& p) {
  const Tile tile = own_tile(p.extents);
  const u32 lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2 != 0;
  const int token = lane % 4 * 2 + odd, feature = lane / 4 - odd;
#pragma unroll
  for (int j = 0; j < kTileM / 8; ++j) {
    const int row = tile.row + 8 * j;
    if (row >= p.extents.m) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Of these eight features the tile and the layer have all or none, or the layer the first ones.
      const int eight = threadIdx.x / 32 * 16 + 8 * i, column = tile.column + eight;
      if (eight >= kTileH || column >= p.extents.features) break;
      const int at = 4 * j + 2 * i;
      const OutputPair g = exchange(gate[at], gate[at + 1], odd);
      const OutputPair u = exchange(up[at], up[at + 1], odd);
      store_features(g, u, p, row + token, column + feature);
    }
  }
}

// The sums of a split k go through shared memory.

// A pair of sums, over all blocks of the cluster in the order of their ranks.
INLINE OutputPair add_up(u32 at) {
  OutputPair sum;
#pragma unroll
  for (u32 rank = 0; rank < kSplit; ++rank) {
    const ptx::Raw<8> part = ptx::load_shared_cluster(ptx::cluster_address(at, rank));
    const float first = ptx::as_float(part.word[0]), second = ptx::as_float(part.word[1]);
    sum.value[0] = rank == 0 ? first : __fadd_rn(sum.value[0], first);
    sum.value[1] = rank == 0 ? second : __fadd_rn(sum.value[1], second);
  }
  return sum;
}

// This block's share of the tokens: a warp takes a token, a lane two features of it at a time.
INLINE void finish_share(const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  const Tile tile = own_tile(p.extents);
  const int first = threadIdx.x / 32 * kSplit + split_rank();
  for (int token = first; token < kTileM; token += kThreads / 32 * kSplit) {
    const int row = tile.row + token;
    if (row >= p.extents.m) break;
    for (int feature = threadIdx.x % 32 * 2; feature < kTileH; feature += 64) {
      const u32 at = ring.base + token * kSumsPitch + feature * 4;
      store_features(add_up(at), add_up(at + kSumsBytes), p, row, tile.column + feature);
    }
  }
}

INLINE void consume(const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  Sums gate, up;
  multiply_tile(gate, up, p, ring);
  if constexpr (kSplit == 1) {
    finish_own(gate, up, p);
  } else {
    // Every warp has read the last stages: the sums may take their place.
    ptx::named_barrier<1>(kConsumers);
    store_sums<kSumsPitch, 0>(gate, ring.base, threadIdx.x / 32);
    store_sums<kSumsPitch, 0>(up, ring.base + kSumsBytes, threadIdx.x / 32);
  }
}

#endif  // TOKEN_ROWS

KERNEL(kThreads, RESIDENTS, sm90_skinny_gated_gemm)(KERNEL_PARAMS(Sm90SkinnyGatedGemmParams) p) {
  const Ring ring(ptx::shared_address(ptx::dynamic_shared()));
  // Of this warp one thread, the same both times.
  const bool produces = threadIdx.x / 32 == kConsumers / 32;
  if (produces && ptx::elect()) {
    ptx::prefetch_tensor_map(&p.gate);
    ptx::prefetch_tensor_map(&p.up);
    ptx::prefetch_tensor_map(&p.x);
    ptx::prefetch_tensor_map(&p.last_x);
    init_barriers(ring);
    if constexpr (!kPaced) Producer{p, ring}.begin();
  }
  __syncthreads();
  if (kPaced && produces) {
    if (ptx::elect()) Producer{p, ring}.bring_weights();
    return;
  }
  const Tile tile = own_tile(p.extents);
  const int left = p.extents.m - tile.row, rows = left < kTileM ? left : kTileM;
  const LineCopies<kConsumers> x(p.x_rows + tile.row * p.x_stride * kElementBytes, p.x_stride, rows, p.extents.k, threadIdx.x);
  ptx::grid_dependency_wait();
  if (threadIdx.x < kConsumers) {
    if constexpr (kTakesRegisters) ptx::registers_request<kTaken>();
    if constexpr (kXAtOnce) bring_first_x(p, ring, x);
    consume(p, ring);
  } else {
    if constexpr (kTakesRegisters) ptx::registers_release<kLeft>();
    if ((kPaced || produces) && ptx::elect()) {
      if constexpr (kPaced) {
        Producer{p, ring}.bring_x();
      } else {
        Producer{p, ring}.finish();
      }
      // The next grid may read weights from here on, which those before this one do not write any more: it, and those
      // behind it that are let go before they have waited.
      if constexpr (!kXAtOnce) ptx::grid_dependency_launch();
    }
  }
#if SPLIT > 1
  // All sums of all blocks are written.
  ptx::cluster_barrier();
  finish_share(p, ring);
  // No block ends while another reads its sums.
  ptx::cluster_barrier();
#endif
}
