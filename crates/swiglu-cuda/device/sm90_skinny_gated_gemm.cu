// h = act(x·Wg + bg, x·Wu + bu) for few rows of x on Hopper: operands exchanged, k split in a cluster.
//
// wgmma has 64 rows at least. Here these are 64 features of the weights, and the tokens are its
// columns, TILE_M of them: no row is wasted on tokens that do not exist. Two instructions with the
// same tokens, one for the gate's features and one for the up's, leave the two pre-activations of an
// output in the same register of two arrays. SPLIT blocks, a cluster, each multiply a part of k;
// then every block adds up its share of the tokens over all of them, through distributed shared
// memory, always in the order of their ranks: the same bits on every launch. The activation follows
// the whole sum.
//
// One warp feeds a ring of STAGES tiles through the copy engine, four multiply. Two blocks share a
// multiprocessor, so that one streams while the other adds up.
//
// Compile-time: ELEMENT 1|2; ORIENTATION 0 = weights [out, in], 1 = [in, out]; TILE_M a multiple of
// 8; SPLIT 1, 2, 4 or 8; STAGES; SHARED_BYTES as the host computed them; BIAS; and what gate.cuh
// names. M, H and K are run-time values; there are SPLIT steps of k at least. What lies outside is
// read as zeros.
//
// Floors: up to about M = 128 the weights, 4·H·K bytes, from memory: 54.6 µs for 4096 × 14336 and
// 4.05 µs for 896 × 4864 at 4.3 TB/s. By Little's law that takes about 21 KB in flight per
// multiprocessor (650 ns); two rings hold up to 196 KB. A stage's 64 × 64 products with N = TILE_M
// take 2·4·max(TILE_M/2, 16) cycles, the shared memory's time for A: 128 cycles for 18 KiB with
// TILE_M = 16, which is 144 B per cycle, five times what memory gives a multiprocessor.
//
// Measured on an H200, bf16, M = 1: 58.7 µs at 4096 × 14336, 93 % of the floor, and 6.8 µs at 896 × 4864,
// both with SPLIT 1. Predicted and refuted: that SPLIT 2 or 4 even out the waves or shorten the latency
// (within 2 and 5 % of the best at most, in 54 problems). Above M of about 128 the weights are read from L2
// once per TILE_M rows, and the tiles of sm90_gated_gemm.cu, which read fewer bytes per product, win.
#include "gated_gemm.cuh"

constexpr int kTileM = TILE_M;
constexpr int kTileH = 64;  // rows of the instruction
constexpr int kTileK = 64;  // 128 bytes: one row of the 128-byte swizzle
constexpr int kSplit = SPLIT;
static_assert(kTileM % 8 == 0 && kTileM <= 128, "two times TILE_M / 2 sums per thread");
static_assert(kSplit == 1 || kSplit == 2 || kSplit == 4 || kSplit == 8, "a portable cluster");

constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 32;
constexpr int kWarps = kThreads / 32;

constexpr int kHalfBytes = kTileH * kTileK * 2;
constexpr int kXBytes = kTileM * kTileK * 2;
constexpr int kStageBytes = 2 * kHalfBytes + kXBytes;
constexpr int kStages = STAGES;
constexpr u32 kSharedBytes = 1024 + kStages * (kStageBytes + 16);
static_assert(kSharedBytes == SHARED_BYTES, "the host and the kernel disagree about shared memory");

// The sums of a tile, as [gate, up][token][feature], in place of the ring. Four floats more per row:
// the lanes of a warp then write to different banks.
constexpr int kSumsPitch = (kTileH + 4) * 4;
constexpr int kSumsBytes = kTileM * kSumsPitch;
static_assert(2 * kSumsBytes <= kStages * kStageBytes, "the sums fit in the ring");

struct alignas(64) Sm90SkinnyGatedGemmParams {
  ptx::TensorMap x, gate, up;  // boxes of one stage
  Extents extents;
  Epilogue epilogue;
};

struct Ring {
  u32 base;
  INLINE explicit Ring(u32 start) : base((start + 1023) & ~1023u) {}
  INLINE u32 stage(u32 step) const { return base + step % kStages * kStageBytes; }
  INLINE u32 full_barrier(u32 step) const {
    return base + kStages * kStageBytes + 8 * (step % kStages);
  }
  INLINE u32 empty_barrier(u32 step) const { return full_barrier(step) + 8 * kStages; }
  static INLINE u32 parity(u32 step) { return step / kStages & 1; }
};

INLINE u32 split_rank() { return kSplit > 1 ? ptx::cluster_rank() : 0; }

// The steps of k that are this block's.
struct Steps {
  int first, count;
};
INLINE Steps own_steps(const Extents& e) {
  const int all = ceiling_divide(e.k, kTileK), rank = split_rank();
  const int first = all * rank / kSplit;
  return {first, all * (rank + 1) / kSplit - first};
}

INLINE void produce(const Sm90SkinnyGatedGemmParams& p, const Ring& ring, Tile tile) {
  const Steps steps = own_steps(p.extents);
  for (u32 step = 0; step < (u32)steps.count; ++step) {
    ptx::barrier_wait(ring.empty_barrier(step), Ring::parity(step) ^ 1);
    const u32 full = ring.full_barrier(step), to = ring.stage(step);
    const int k = (steps.first + step) * kTileK;
    ptx::barrier_arrive_expect(full, kStageBytes);
    if constexpr (kInOut) {
      ptx::tensor_load(to, &p.gate, full, tile.column, k);
      ptx::tensor_load(to + kHalfBytes, &p.up, full, tile.column, k);
    } else {
      ptx::tensor_load(to, &p.gate, full, k, tile.column);
      ptx::tensor_load(to + kHalfBytes, &p.up, full, k, tile.column);
    }
    ptx::tensor_load(to + 2 * kHalfBytes, &p.x, full, k, tile.row);
  }
}

// Descriptor units are 16 bytes; 16 k further.
constexpr u32 kXStep = 32 / 16;
constexpr u32 kWeightStep = kInOut ? 16 * 128 / 16 : 32 / 16;

typedef float Sums[kTileM / 2];

// Writes one half's sums: element 4j + 2i + c of a thread is feature 16·warp + lane/4 + 8i of token
// 8j + 2(lane % 4) + c.
INLINE void store_sums(const Sums& d, u32 to) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 at = to + lane % 4 * 2 * kSumsPitch + (warp * 16 + lane / 4) * 4;
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) {
    const u32 token = i / 4 * 8 + i % 2, feature = i / 2 % 2 * 8;
    ptx::store_shared(at + token * kSumsPitch + feature * 4, ptx::as_bits(d[i]));
  }
}

INLINE void multiply(const Sm90SkinnyGatedGemmParams& p, const Ring& ring) {
  Sums gate, up;
  const u32 steps = own_steps(p.extents).count;
  // Unrolled, the compiler moves sums between registers, and serialises the multiplications (C7520).
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step) {
    ptx::barrier_wait(ring.full_barrier(step), Ring::parity(step));
    const u32 stage = ring.stage(step);
    const u64 wg = ptx::swizzled_operand(stage, 0);
    const u64 wu = ptx::swizzled_operand(stage + kHalfBytes, 0);
    const u64 x = ptx::swizzled_operand(stage + 2 * kHalfBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) {
      ptx::wgmma<kTileM, kIsBf16, false, kInOut>(gate, wg + j * kWeightStep, x + j * kXStep,
                                                 (step | j) != 0);
      ptx::wgmma<kTileM, kIsBf16, false, kInOut>(up, wu + j * kWeightStep, x + j * kXStep,
                                                 (step | j) != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    // The step before has retired.
    if (step > 0 && threadIdx.x == 0) ptx::barrier_arrive(ring.empty_barrier(step - 1));
  }
  ptx::wgmma_wait<0>();
  // Every warp has read the last stages: the sums may take their place.
  ptx::named_barrier<1>(kConsumers);
  store_sums(gate, ring.base);
  store_sums(up, ring.base + kSumsBytes);
}

// A pair of sums, over all blocks of the cluster in the order of their ranks.
struct SumPair {
  float value[2];
};
INLINE SumPair add_up(u32 at) {
  SumPair sum;
#pragma unroll
  for (u32 rank = 0; rank < kSplit; ++rank) {
    ptx::Raw<8> part;
    if constexpr (kSplit > 1) {
      part = ptx::load_shared_cluster(ptx::cluster_address(at, rank));
    } else {
      part = ptx::load_shared_pair(at);
    }
    const float first = ptx::as_float(part.word[0]), second = ptx::as_float(part.word[1]);
    sum.value[0] = rank == 0 ? first : __fadd_rn(sum.value[0], first);
    sum.value[1] = rank == 0 ? second : __fadd_rn(sum.value[1], second);
  }
  return sum;
}

// This block's share of the tokens: a warp takes a token, a lane two features of it.
INLINE void finish(const Sm90SkinnyGatedGemmParams& p, const Ring& ring, Tile tile) {
  const u32 lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * kSplit + split_rank();
  for (int token = first; token < kTileM; token += kWarps * kSplit) {
    const int row = tile.row + token;
    if (row >= p.extents.m) break;
    const u32 at = ring.base + token * kSumsPitch + lane * 8;
    const int column = tile.column + 2 * lane;
    const SumPair gate = add_up(at), up = add_up(at + kSumsBytes);
    store_pair(activate_pair(gate.value[0], gate.value[1], up.value[0], up.value[1], p.epilogue,
                             p.extents, row, column),
               p.epilogue, p.extents, row, column);
  }
}

KERNEL(kThreads, 2, sm90_skinny_gated_gemm)(KERNEL_PARAMS(Sm90SkinnyGatedGemmParams) p) {
  const Ring ring(ptx::shared_address(ptx::dynamic_shared()));
  const Tile tile = tile_at<kTileM, kTileH>(blockIdx.x / kSplit, p.extents);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ring.full_barrier(s), 1);
      ptx::barrier_init(ring.empty_barrier(s), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  if (threadIdx.x < kConsumers) {
    multiply(p, ring);
  } else if (threadIdx.x == kConsumers) {
    produce(p, ring, tile);
  }
  // All sums of all blocks are written.
  if constexpr (kSplit > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  finish(p, ring, tile);
  // No block ends while another reads its sums.
  if constexpr (kSplit > 1) ptx::cluster_barrier();
}
